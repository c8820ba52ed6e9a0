"""Random numbers for rules: the same bits in every library and engine, and those that the documentation says."""

from dataclasses import dataclass
from hashlib import blake2s

import ml_dtypes
import numpy as np
import pytest

import arrayopt as ao
from arrayopt import randomness
from arrayopt.engines.layers import Tensor
from arrayopt.fusion.plan import plan_for
from arrayopt.rules.draws import Drawn
from tests.cudacpu import standin
from tests.support.slow import marked

WORD = 0xFFFFFFFF


# ---- a witness that shares nothing ----------------------------------------------------------------------------------


def block(x, y, k0, k1):
    """Both words of Threefry2x32-20, as the paper has it, in integers of Python."""
    ks = k0, k1, k0 ^ k1 ^ 0x1BD11BDA
    x, y = x + ks[0] & WORD, y + ks[1] & WORD
    for d in range(20):
        r = (13, 15, 26, 6, 17, 29, 16, 24)[d % 8]
        x = x + y & WORD
        y = (y << r | y >> 32 - r) & WORD ^ x
        if d % 4 == 3:
            j = d // 4 + 1
            x, y = x + ks[j % 3] & WORD, y + ks[(j + 1) % 3] + j & WORD
    return x, y


def number(seed, stream, name, position, t):
    """One number, as the documentation says."""
    made = blake2s(f"{seed}:{stream}:{name}".encode(), digest_size=8).digest()
    k0, k1 = (int.from_bytes(made[i : i + 4], "little") for i in (0, 4))
    return (block(position & WORD, t & WORD, k0 + (position >> 32) & WORD, k1)[0] >> 8) / 2**24


def numbers(seed, stream, name, shape, t, first=0):
    n = int(np.prod(shape))
    return np.array([number(seed, stream, name, first + i, t) for i in range(n)]).reshape(shape)


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


# ---- in every engine ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, repr=False)
class Draws(ao.Rule):
    """Keeps what it draws. It looks at `rows`, or at `products` of matrices, so that tensors are seen in other ways."""

    rows: bool = ao.flag(False)
    products: bool = ao.flag(False)

    def slots(self, xp, p):
        return {"u": xp.zeros_like(p), "v": xp.zeros_like(p)}

    def update(self, xp, p, g, s, h):
        u, v = ao.random(h), ao.random(h, 3)
        q = p - (u - 0.5)
        if self.rows and p.ndim > 1:
            q = q - 0.25 * xp.mean(u * v, axis=-1, keepdims=True)
        if self.products and p.ndim > 1:
            x = g + ao.random(h, 9)
            q = q + (x @ x.mT) @ x
        return q, {"u": u, "v": v}


SHAPES = {"a": (3,), "few": (5, 7), "same": (5, 7), "none": (), "wide": (20, 30), "kernels": (70, 2, 3)}
T = 3
EXPECTED = {
    (name, slot): numbers(11, stream, name, shape, T)
    for name, shape in SHAPES.items()
    for slot, stream in (("u", 0), ("v", 3))
}

LIBRARIES = {  # what makes an array, and what takes it back
    "numpy": (np.asarray, np.asarray),
    "array_api_strict": (lambda x: pytest.importorskip("array_api_strict").asarray(x), np.asarray),
    "torch": (lambda x: pytest.importorskip("torch").from_numpy(np.array(x)), np.asarray),
    "jax": (lambda x: pytest.importorskip("jax").numpy.asarray(x), np.asarray),
    "cupy": (lambda x: standin_module().asarray(x), lambda x: x.get()),
}


def standin_module():
    import cupy

    return cupy


def drawn(library, engine, rule, shapes=None, dtype="float32", steps=T):
    """An optimizer after some steps."""
    made = LIBRARIES[library][0]
    shapes = SHAPES if shapes is None else shapes
    opt = ao.Optimizer({name: made(np.ones(shape, dtype)) for name, shape in shapes.items()}, rule, engine=engine)
    for _ in range(steps):
        opt.step({name: made(np.ones(shape, dtype)) for name, shape in shapes.items()})
    return opt


def check(opt, library="numpy", expected=None):
    back = LIBRARIES[library][1]
    for (name, slot), x in (EXPECTED if expected is None else expected).items():
        np.testing.assert_array_equal(np.asarray(back(opt.state[name][slot]), "f8"), x, err_msg=f"{name} {slot}")


FORMS = {"flat": {}, "rows": {"rows": True}, "products": {"products": True}}
ENGINES = [
    ("numpy", "array_api"),
    ("numpy", "numpy"),
    ("numpy", "numba"),
    ("array_api_strict", "array_api"),
    ("torch", "array_api"),
    ("torch", "numba"),
    ("jax", "array_api"),
]


@pytest.mark.parametrize(
    ("library", "engine", "form"),
    marked(
        [(*x, form) for x in ENGINES for form in FORMS],
        lambda library, engine, form: library != "jax" and (engine != "numba" or (library, form) == ("numpy", "flat")),
    ),
)
def test_every_engine_draws_what_is_documented(library, engine, form):
    check(drawn(library, engine, Draws(seed=11, **FORMS[form])), library)


@pytest.mark.parametrize("form", marked([("flat",), ("rows",)], lambda form: form == "flat"))
def test_a_device_draws_what_is_documented(cupy, form):
    check(drawn("cupy", "cupy", Draws(seed=11, **FORMS[form])), "cupy")


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
        [(engine, form) for engine in ("array_api", "numpy", "numba", "cupy") for form in ("flat", "rows")],
        lambda engine, form: engine in ("array_api", "numpy") or (engine, form) == ("numba", "flat"),
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


def test_threads_change_no_bit(monkeypatch):
    from arrayopt.engines.numba import engine as compiled
    from arrayopt.engines.numpy import engine as blocks

    monkeypatch.setattr(blocks, "SHARED", 64)
    monkeypatch.setattr(blocks, "PACKED", 64)
    monkeypatch.setattr(compiled, "SHARED", 64)
    monkeypatch.setattr(compiled, "ALONE", 64)
    for name, home in (("numpy", blocks), ("numba", compiled)):
        for n in (1, 2, 3, 5):
            monkeypatch.setattr("arrayopt.engines.fused.thread_count", lambda n=n: n)
            check(drawn("numpy", name, Draws(seed=11)))
        assert home.SHARED == 64


def test_under_jit_with_a_count_that_is_traced():
    jax = pytest.importorskip("jax")
    rule, params = Draws(seed=11), {name: jax.numpy.ones(SHAPES[name], "float32") for name in ("few", "none")}
    step = jax.jit(lambda params, state: ao.update(rule, params, params, state))
    state = rule.init(params)
    for _ in range(T):
        params, state = step(params, state)
    for name, slot in ((name, slot) for name in params for slot in ("u", "v")):
        np.testing.assert_array_equal(np.asarray(state["tensors"][name][slot], "f8"), EXPECTED[name, slot])


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
        ({}, 0, TypeError, "random: `h` must be what a rule's update, or a projection, was given"),
        (None, "1", TypeError, "random: `stream` must be a whole number; got '1'"),
        (None, True, TypeError, "random: `stream` must be a whole number; got True"),
        (None, 1.0, TypeError, "random: `stream` must be a whole number; got 1.0"),
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
        assert "cannot be traced" in str(caught.value)
        return
    with pytest.raises(error, match=words):
        opt.step(np.ones(2))
    assert (opt.params == 1).all()


@pytest.mark.parametrize(
    ("seed", "error", "words"),
    [
        (1.0, TypeError, "Draws: `seed` must be a whole number; got 1.0"),
        (True, TypeError, "Draws: `seed` must be a whole number; got True"),
        ("1", TypeError, "Draws: `seed` must be a whole number; got '1'"),
        (-1, ValueError, r"Draws: `seed` must be in \[0, 2\*\*64\); got -1"),
        (1 << 64, ValueError, r"Draws: `seed` must be in \[0, 2\*\*64\); got 18446744073709551616"),
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

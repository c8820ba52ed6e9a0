"""State in 8 bits over shapes with every remainder of a block, beside a witness in plain Python."""

import dataclasses

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.state.quantized import dequantized, quantized
from arrayopt.testing import assert_equivalent
from tests.rules.test_quantized import as_host, awkward, kept, witness
from tests.support import witness as rules
from tests.support.engines import EVERY, SLOW, each_engine
from tests.support.slow import marked

SIZES = {f"n{n}": (n,) for n in range(1, 34)} | {f"n{n}": (n,) for n in range(8192 - 16, 8192 + 17)}
ROWS = {f"r{n}": (3, n) for n in range(31, 66)}


LARGEST = [2.0**-119, np.nextafter(np.float32(2.0**-119), np.float32(0)), 1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, 1e-45, 0.0]
LARGEST += [np.inf, -np.inf, np.nan, np.finfo("float32").max, 1.0, -3.0]
"""Largest magnitudes of blocks: at the ends of what is stored, and half-way between two scales."""


def edges(blocks):
    """So many whole blocks, which begin with each of the `LARGEST`; and a short one."""
    x = np.zeros(32 * blocks + 5, "float32")
    x[::32] = np.resize(np.float32(LARGEST), blocks + 1)
    x[1::32] = x[::32] / 2
    return x


@dataclasses.dataclass(frozen=True, kw_only=True)
class Told(ao.Rule):
    """A rule whose parameters become what was stored less the gradient, so that all bits of what is read are seen."""

    squares = ("v",)
    rows: bool = False

    def slots(self, xp, p):
        return {"m": xp.zeros_like(p), "v": xp.zeros_like(p)}

    def update(self, xp, p, g, s, h):
        told = s["m"] if not self.rows else s["m"] + 0.0 * xp.max(s["m"], axis=-1, keepdims=True)
        return xp.where(g == 0.0, s["v"], told - g), {"m": g, "v": g * g}


@pytest.mark.parametrize("engine", marked([(e,) for e in EVERY], lambda e: e not in SLOW))
def test_codes_are_the_witness_s_for_every_remainder(engine):
    grads = {name: awkward(*shape, positive=False) for name, shape in SIZES.items()}
    grads |= {f"edges{n}": edges(n) for n in (len(LARGEST), 4 * len(LARGEST))}
    opt = ao.Optimizer({name: np.zeros_like(g) for name, g in grads.items()}, kept(), engine=engine)
    opt.step(grads)
    for name, g in grads.items():
        with np.errstate(over="ignore"):
            roots = np.sqrt((g * g).astype(np.float32))
        for slot, x, top in (("m", g, 127), ("v", roots, 255)):
            codes, scales, _ = witness(x, top)
            assert as_host(opt.state[name][slot]).tolist() == codes, (name, slot)
            found = as_host(opt.state[name][f"scale_{slot}"]).astype("float32")
            assert np.array_equal(found, scales, equal_nan=True), (name, slot)


@each_engine
@pytest.mark.parametrize("rows", [False, True])
def test_engines_read_what_was_stored_to_the_last_bit(engine, rows):
    shapes = ROWS if rows else SIZES
    params = {name: np.zeros(shape, "float32") for name, shape in shapes.items()}
    opt = ao.Optimizer(params, Told(state_dtype="int8", rows=rows), engine=engine)
    rng = np.random.default_rng(0)
    grads = {name: rng.standard_normal(shape).astype("float32") for name, shape in shapes.items()}
    opt.step(grads)
    opt.step(grads)
    for name, g in grads.items():
        assert opt.params[name].tobytes() == (dequantized(*quantized(g, "int8")) - g).tobytes(), name
    opt.step({name: g * 0 for name, g in grads.items()})
    for name, g in grads.items():
        root = dequantized(*quantized(np.sqrt(g * g), "uint8"))
        assert opt.params[name].tobytes() == (root * root).tobytes(), name


def read(state, slot, top):
    """What a slot stands for, from its definition."""
    scales = np.repeat(as_host(state[f"scale_{slot}"]).astype("float32") * np.float32(1 / top), 32)
    codes = as_host(state[slot]).reshape(-1).astype("float32")
    return codes * scales[: codes.size]


@pytest.mark.parametrize(
    ("engine", "rule"),
    marked(
        [(e, rule) for e in EVERY for rule in ("AdamW", "LAMB", "LANS")],
        lambda e, rule: e not in SLOW and rule == "LAMB",
    ),
)
def test_steps_are_the_witness_s_from_codes_to_codes(engine, rule):
    """Each begins with what the codes before it say; where a number lies between two codes, it may have the other."""
    options, rng = {"lr": 0.01, "weight_decay": 0.1}, np.random.default_rng(7)
    shapes = {f"n{n}": (n,) for n in range(1, 66)} | {f"r{n}": (3, n) for n in (31, 32, 33)}
    params = {name: rng.standard_normal(shape).astype("float32") for name, shape in shapes.items()}
    opt = ao.Optimizer(params, getattr(ao, rule)(**options, state_dtype="int8"), engine=engine)
    off = total = 0
    for t in (1, 2, 3):
        grads = {name: rng.standard_normal(shape).astype("float32") for name, shape in shapes.items()}
        states = {name: {"m": read(s, "m", 127), "v": read(s, "v", 255) ** 2} for name, s in opt.state.items()}
        olds = {name: p.reshape(-1).tolist() for name, p in opt.params.items()}
        opt.step(grads)
        for name, shape in shapes.items():
            state = {slot: x.tolist() for slot, x in states[name].items()}
            new, slots = rules.step(rule, options, shape, olds[name], grads[name].reshape(-1).tolist(), state, t)
            np.testing.assert_allclose(opt.params[name].reshape(-1), new, rtol=1e-4, atol=1e-6)
            for slot, x, top in (("m", slots["m"], 127), ("v", np.sqrt(slots["v"]), 255)):
                apart = abs(as_host(opt.state[name][slot]).reshape(-1).astype(int) - witness(x, top)[0])
                assert apart.max() <= 1
                off, total = off + int(apart.sum()), total + apart.size
    assert off <= 0.002 * total


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
@pytest.mark.parametrize("engine", marked([("numpy",), ("cpp",), ("numba",)], lambda e: e == "cpp"))
def test_ranks_have_the_bytes_of_one_process(engine, ranks):
    shapes = {"long": (3 * 8192 + 77,), "rows": (70, 160), "odd": (50, 45), "short": (31,)}

    def train(comm):
        rng = np.random.default_rng(0)
        params = {name: rng.standard_normal(shape).astype("float32") for name, shape in shapes.items()}
        opt = ao.Optimizer(params, ao.LAMB(lr=0.01, state_dtype="int8"), engine=engine, comm=comm)
        for _ in range(2):
            opt.step({name: rng.standard_normal(shape).astype("float32") for name, shape in shapes.items()})
        slots = opt.state_dict()["tensors"]
        found = {name: {slot: np.asarray(x).tobytes() for slot, x in slots[name]["slots"].items()} for name in shapes}
        return found, {name: x.tobytes() for name, x in params.items()}

    (one,) = ao.ranks.run(1, train)
    assert ao.ranks.run(ranks, train) == [one] * ranks


@pytest.mark.parametrize("rule", [ao.CAME(lr=0.01, state_dtype="int8"), ao.LAMB(lr=0.01, state_dtype="int8")])
@each_engine
def test_tensors_of_pytorch_have_the_same_state(engine, rule):
    """Also in rows that are no blocks, which compiled engines widen before a step."""
    torch = pytest.importorskip("torch")
    if engine == "numpy":
        pytest.skip("the engine takes NumPy arrays alone")
    p = np.random.default_rng(0).standard_normal((7, 45)).astype("float32")
    one = ao.Optimizer({"w": p.copy()}, rule, engine=engine)
    other = ao.Optimizer({"w": torch.from_numpy(p.copy())}, rule, engine=engine)
    for k in range(3):
        g = np.random.default_rng(k).standard_normal(p.shape).astype("float32")
        one.step({"w": g})
        other.step({"w": torch.from_numpy(g)})
    apart = one.state["w"]["m"].astype(int) - other.state["w"]["m"].numpy().astype(int)
    assert np.abs(apart).max() <= (1 if engine == "array_api" else 0)
    assert np.allclose(one.params["w"], other.params["w"], rtol=1e-4, atol=1e-5)


def test_there_is_a_verification_of_8_bits():
    """Each step begins with the reference's codes; what is stored otherwise is seen."""
    params = {"w": np.random.default_rng(0).standard_normal((5, 33)).astype("float32")}
    rule = ao.LAMB(lr=0.01, state_dtype="int8")
    grads = lambda p, k: {"w": np.random.default_rng(k).standard_normal((5, 33)).astype("float32")}  # noqa: E731
    found = assert_equivalent(rule, params, grads, engines=["numpy:numpy", "numpy:cpp", "torch:cpp"])
    assert all(outcome.difference.ulps < 16 for outcome in found.values())


def test_a_verification_sees_codes_that_are_off(monkeypatch):
    from arrayopt.engines.numpy import engine

    params = {"w": np.ones((5, 32), "float32")}
    wrong = engine._Blocks.put_wide

    def off(self, row, name, value):
        wrong(self, row, name, np.asarray(value)[..., ::-1])

    monkeypatch.setattr(engine._Blocks, "put_wide", off)
    grads = {"w": np.random.default_rng(1).standard_normal((5, 32)).astype("float32")}
    with pytest.raises(AssertionError, match=r"slot 'buf' of 'w' is .* codes off after step 0"):
        assert_equivalent(
            ao.SGD(lr=0.1, momentum=0.9, state_dtype="int8"), params, lambda p, k: grads, engines=["numpy:numpy"]
        )

"""Rings: slots of k members, of which one at a time is overwritten, in all engines, beside plain NumPy."""

import copy
import dataclasses

import array_api_strict
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import arrayopt as ao
from arrayopt.rules.rings import Ring
from tests.support.engines import EVERY, SLOW
from tests.support.ringed import ringed, witness
from tests.support.slow import PROFILE, marked, settled

SHAPES = {"matrix": (3, 7), "kernel": (2, 3, 5), "long": (1031,), "one": (1,), "number": ()}
CLOSE = {"float64": 1e-12, "float32": 2e-5, "complex64": 2e-5, "bfloat16": 2e-2}
STEPS = 8


def arrays(dtype, seed, shapes=SHAPES):
    """Random arrays, complex ones with both parts."""
    rng = np.random.default_rng(seed)
    dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    made = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    if dtype == "complex64":
        made = {name: x + 1j * rng.standard_normal(x.shape) for name, x in made.items()}
    return {name: np.asarray(x).astype(dtype) for name, x in made.items()}


def trained(engine, k, dtype="float32", *, comm=None, shapes=SHAPES, steps=STEPS, **fields):
    """An optimizer after some steps."""
    opt = ao.Optimizer(arrays(dtype, 0, shapes), ringed(k)(**fields), engine=engine, comm=comm)
    for t in range(steps):
        opt.step(arrays(dtype, t + 1, shapes))
    return opt


def expected(k, dtype="float32", shapes=SHAPES, steps=STEPS):
    """The witness's parameters and members, by the names of tensors."""
    start, grads = arrays(dtype, 0, shapes), [arrays(dtype, t + 1, shapes) for t in range(steps)]
    return {name: witness(p, [g[name] for g in grads], k) for name, p in start.items()}


def in_order(ring, written):
    """The members of a ring from the oldest to the newest, after so many were written."""
    return np.roll(np.asarray(ring, complex), -(written % ring.shape[0]), axis=0)


def check(opt, k, dtype="float32", shapes=SHAPES, close=None):
    """The optimizer has what the witness has."""
    close = close or CLOSE[dtype]
    for name, (p, points, gradients) in expected(k, dtype, shapes).items():
        np.testing.assert_allclose(np.asarray(opt.params[name], complex), p, rtol=close, atol=close, err_msg=name)
        state = opt.state[name]
        assert state["s"].shape == (k, *p.shape)
        for slot, members in (("s", points), ("y", gradients)):
            found = in_order(state[slot], STEPS - 1)
            np.testing.assert_allclose(found, np.stack(members), rtol=close, atol=close, err_msg=name)


CASES = [(e, k, d) for e in EVERY for k in (1, 2, 4, 10) for d in CLOSE if k < 10 or e not in SLOW]
QUICK = {(4, "float32"), (1, "float64"), (3, "complex64"), (2, "bfloat16"), (10, "float32")}


@pytest.mark.parametrize(
    ("engine", "k", "dtype"),
    marked(
        [*CASES, *((e, 3, "complex64") for e in EVERY)],
        lambda e, k, d: e not in SLOW and (k, d) in QUICK and (e, k) != ("cpp", 10),
    ),
)
def test_every_engine_has_what_the_witness_has(engine, k, dtype):
    check(trained(engine, k, dtype), k, dtype)


@pytest.mark.parametrize("k", [pytest.param(k, marks=[pytest.mark.slow] * (k not in (3,))) for k in range(1, 11)])
def test_any_length(k):
    for engine in ("array_api", "numpy"):
        check(trained(engine, k, "float64"), k, "float64")


@pytest.mark.parametrize(
    ("engine", "ranks"), marked([(e, n) for e in EVERY for n in (2, 3, 4)], lambda e, n: e == "numpy" and n < 4)
)
def test_ranks_change_no_bit(engine, ranks):
    alone = trained(engine, 4).params

    def run(comm):
        return {name: np.array(x) for name, x in trained(engine, 4, comm=comm).params.items()}

    for found in ao.ranks.run(ranks, run):
        for name, x in alone.items():
            assert found[name].tobytes() == x.tobytes()


@pytest.mark.parametrize("engine", [e for e in EVERY if e not in SLOW])
def test_stacked_layers_are_as_tensors(engine):
    shapes = {"a": (5, 3), "b": (5, 3), "c": (5, 3)}
    each = trained(engine, 4, shapes=shapes)
    start, grads = arrays("float32", 0, shapes), [arrays("float32", t + 1, shapes) for t in range(STEPS)]
    opt = ao.Optimizer(np.stack(list(start.values())), ringed(4)(stacked=True), engine=engine)
    for g in grads:
        opt.step(np.stack(list(g.values())))
    for i, name in enumerate(shapes):
        np.testing.assert_allclose(opt.params[i], each.params[name], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(opt.state["param"]["s"][:, i], each.state[name]["s"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("engine", [e for e in EVERY if e not in SLOW])
@pytest.mark.parametrize(("stored", "close"), [("bfloat16", 2e-2), ("float16", 2e-3), ("int8", 5e-2)])
def test_members_that_are_narrow_are_rounded_once(engine, stored, close):
    opt = trained(engine, 4, state_dtype={"s": stored, "y": stored})
    short = trained(engine, 4, steps=STEPS - 1, state_dtype=stored)
    for name, (_, _, gradients) in expected(4).items():
        if stored != "int8":
            assert opt.state[name]["y"].dtype.name == stored
            np.testing.assert_allclose(in_order(opt.state[name]["y"], STEPS - 1).real, gradients, rtol=close, atol=1e-7)
        for i in {0, 1, 2, 3} - {(STEPS - 2) % 4}:  # what is not written keeps its bits
            assert opt.state[name][f"y_{i}"].tobytes() == short.state[name][f"y_{i}"].tobytes(), (name, i)


def test_libraries():
    for asarray in (torch.tensor, jnp.asarray, array_api_strict.asarray):
        start = {name: asarray(x) for name, x in arrays("float32", 0).items()}
        opt = ao.Optimizer(start, ringed(3)())
        for t in range(STEPS):
            opt.step({name: asarray(x) for name, x in arrays("float32", t + 1).items()})
        check(opt, 3)


def test_functional():
    params, rule = arrays("float32", 0), ringed(3)()
    state = ao.init(rule, params)
    for t in range(STEPS):
        params, state = ao.update(rule, params, arrays("float32", t + 1), state)
    for name, (p, _, _) in expected(3).items():
        np.testing.assert_allclose(params[name], p, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("how", ["file", "dict", "copy"])
def test_a_run_goes_on(how, tmp_path):
    straight, opt = trained("numpy", 3), trained("numpy", 3, steps=STEPS - 2)
    if how == "copy":
        other = copy.deepcopy(opt)
    else:
        other = ao.Optimizer({name: np.array(x) for name, x in opt.params.items()}, ringed(3)(), engine="array_api")
        if how == "file":
            opt.save(tmp_path / "run.safetensors")
            other.load(tmp_path / "run.safetensors")
        else:
            other.load_state_dict(opt.state_dict())
    for t in (STEPS - 2, STEPS - 1):
        other.step(arrays("float32", t + 1))
    for name, x in straight.params.items():
        np.testing.assert_allclose(other.params[name], x, rtol=1e-5, atol=1e-6)


def test_a_ring_is_shown_and_given_as_one():
    opt = trained("numpy", 3)
    state = opt.state["matrix"]
    assert list(state) == ["t", "n", "s", "y"]
    assert len(state) == 4
    given = np.arange(63, dtype="float32").reshape(3, 3, 7)
    state["s"] = given
    assert (state["s"] == given).all()
    assert (state["s_1"] == given[1]).all()
    for bad, said in [
        (given[:2], "first axis has length 3"),
        (given[:, :2], "shape"),
        (given.astype(float), "float32"),
    ]:
        with pytest.raises((TypeError, ValueError), match=said):
            state["s"] = bad
    assert (state["s"] == given).all()


def test_one_member_is_written_and_all_are_read():
    rule = ringed(5)()
    said = ao.Optimizer(np.zeros(9, "float32"), rule, engine="cpp").explain()
    numbers = [float(line.split(" bytes per")[0]) for line in said.splitlines() if "bytes per float32" in line]
    # g, p and ten members, of which two are written, and what the points have been mixed to; then the rest again
    assert numbers == [4 * (12 + 3 + 8 + 1)], said


def test_what_cannot_be_is_told():
    p = np.zeros(3, "float32")
    ring = Ring((p, p))
    for call, error, said in [
        (lambda: ao.ring(np, p, 0), ValueError, "at least 1"),
        (lambda: ao.ring(np, p, 2.0), TypeError, "an integer"),
        (lambda: ao.dots(p, p), TypeError, "must be a ring"),
        (lambda: ao.combined(ring, [1.0]), ValueError, "coefficients must be 2; got 1"),
        (lambda: ao.combined(p, [1.0]), TypeError, "needs a ring"),
        (lambda: ao.put(p, 0, p), TypeError, "needs a ring"),
        (lambda: ao.put(ring, p, 0), TypeError, r"`x` must be an array like a member: put\(ring, index, x\); got 0"),
        (lambda: ring[1.0], TypeError, "index must be a Python integer"),
    ]:
        with pytest.raises(error, match=said):
            call()


@pytest.mark.parametrize(
    ("made", "back", "said"),
    [
        (np.zeros(3), None, "must return a ring, made by `arrayopt.ring`"),
        (ao.ring(np, np.zeros(3), 3), np.zeros(3), "each ring unchanged, or a `put` of it; 's' is an array"),
        (ao.ring(np, np.zeros(3), 3), ao.ring(np, np.zeros(3), 2), "'s' is a ring of 2"),
    ],
)
def test_what_rules_return_is_checked(made, back, said):
    @dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
    class Wrong(ao.Rule):
        rings = ("s",)

        def slots(self, xp, p):
            return {"s": made}

        def update(self, xp, p, g, s, h):
            return p, {"s": back}

    with pytest.raises(TypeError, match=said):
        ao.Optimizer(np.zeros(3), Wrong(), engine="array_api").step(np.zeros(3))


@settled(6)
@given(
    engine=st.sampled_from([e for e in EVERY if e not in SLOW or PROFILE != "quick"]),
    k=st.sampled_from([1, 3, 9]),
    ranks=st.integers(1, 4),
    absent=st.lists(st.tuples(st.integers(0, 7), st.sampled_from(sorted(SHAPES))), max_size=8),
    accumulate=st.sampled_from([1, 2]),
)
def test_any_of_it_together(engine, k, ranks, absent, accumulate):
    """On ranks, with gradients that are absent or accumulated, beside the witness in double precision."""
    if accumulate > 1:  # a mean is of all calls, or of none
        absent = [(t // 2 * 2 + i, name) for t, name in absent for i in (0, 1)]
    calls = [arrays("float64", t + 1) for t in range(8)]

    def run(comm=None):
        opt = ao.Optimizer(arrays("float64", 0), ringed(k)(), engine=engine, comm=comm, accumulate=accumulate)
        for t, grads in enumerate(calls):
            opt.step({name: None if (t, name) in absent else g for name, g in grads.items()})
        return {name: np.array(x) for name, x in opt.params.items()}

    found = run()
    for name, start in arrays("float64", 0).items():
        taken = [t for t in range(0, 8, accumulate) if (t, name) not in absent]
        means = [np.mean([calls[t + i][name] for i in range(accumulate)], axis=0) for t in taken]
        expected, _, _ = witness(start, means, k)
        np.testing.assert_allclose(found[name], expected, rtol=1e-9, atol=1e-11, err_msg=name)
    for other in ao.ranks.run(ranks, run):
        for name, x in found.items():
            assert other[name].tobytes() == x.tobytes(), name


def test_a_ring_of_pytorchs_state_is_one_tensor():
    torch = pytest.importorskip("torch")
    import arrayopt.torch

    p = torch.nn.Parameter(torch.ones(2, 3))
    opt = arrayopt.torch.optimizer(ringed(3))([p], lr=0.1)
    for _ in range(2):
        p.grad = torch.full((2, 3), 0.5)
        opt.step()
    assert opt.state[p]["s"].shape == (3, 2, 3)
    assert torch.equal(opt.state[p]["s"][1], opt.state[p]["s_1"])
    opt.state[p]["s"] = torch.full((3, 2, 3), 2.0)
    assert (opt.state[p]["s_2"] == 2).all()
    with pytest.raises(ValueError, match="ring 's' must be a tensor whose first axis has length 3"):
        opt.state[p]["s"] = torch.zeros(2, 2, 3)
    with pytest.raises(KeyError):
        opt.state[p]["nothing"]
    assert "s" not in opt.state_dict()["state"][0]


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (np.zeros((2, 2, 3)), "ring 's' of 'w' must be an array whose first axis has length 3"),
        (np.zeros((3, 3, 2)), r"slot 's\[0\]' of 'w' must have shape \(2, 3\); got \(3, 2\)"),
        (np.zeros((3, 2, 3), np.float32), r"slot 's\[0\]' of 'w' must be of dtype float64; got float32"),
    ],
)
def test_what_is_no_ring_is_refused(value, error):
    opt = ao.Optimizer({"w": np.ones((2, 3))}, ringed(3)(), engine="numpy")
    with pytest.raises((TypeError, ValueError), match=error):
        opt.state["w"]["s"] = value
    with pytest.raises(ValueError, match="slots are 'n', 's', 'y'"):
        opt.state["w"]["q"] = np.zeros((2, 3))

"""The functional form: pure, the same as the Optimizer, and fit for jit, scan, grad, vmap and PyTorch's autograd."""

import copy
import dataclasses
import math
from collections import OrderedDict
from typing import NamedTuple

import array_api_compat
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import arrayopt as ao
from tests.conftest import BACKENDS
from tests.support import witness
from tests.support.cases import ALL, CASES, IDS, make
from tests.support.slow import marked
from tests.support.tolerances import TOLERANCES

SHAPES = {"w": (3, 4), "b": (4,), "zero": (), "empty": (0, 2)}
NEAR = TOLERANCES["float64"].relative
each_rule = pytest.mark.parametrize(("name", "options"), ALL, ids=IDS)


def quick_of(rows, names=tuple(CASES)):
    """Rows for tests in which JAX compiles each: the first of some rules in each run."""
    return pytest.mark.parametrize(
        ("name", "options"),
        [
            pytest.param(
                *row,
                id=IDS[ALL.index(row)],
                marks=() if row[1] is CASES[row[0]][0] and row[0] in names else pytest.mark.slow,
            )
            for row in rows
        ],
    )


FEW = ("LAMB", "SGD")
few_of_each = quick_of([(name, rows[0]) for name, rows in CASES.items()], FEW)


class Layer(NamedTuple):
    weight: object
    bias: object


def tree(seed=0, shapes=SHAPES):
    """NumPy float64 arrays; the one called zero is zero."""
    rng = np.random.default_rng(seed)
    made = {name: np.asarray(rng.standard_normal(shape)) for name, shape in shapes.items()}
    return made | ({"zero": np.zeros(shapes["zero"])} if "zero" in shapes else {})


def to(backend, arrays, dtype="float64"):
    return {name: backend.array(x, dtype) for name, x in arrays.items()}


def to_jax(arrays):
    return jax.tree.map(jnp.asarray, arrays)


def to_torch(arrays, **options):
    return {name: torch.tensor(x, dtype=torch.float64, **options) for name, x in arrays.items()}


def run(rule, params, grads, steps=3, shift=0.0):
    """Parameters and state after some steps; the gradients are shifted by more from step to step."""
    state = rule.init(params)
    for s in range(steps):
        now = {name: g + s * shift for name, g in grads.items()} if shift else grads
        params, state = ao.update(rule, params, now, state)
    return params, state


def total(params):
    """A number that every element of every tensor has a part in."""
    leaves = [params[name] for name in sorted(params)]  # as jit sorts the keys of dicts
    return sum((k + 1.0) * ((x - 0.3) ** 2).sum() for k, x in enumerate(leaves))


def assert_close(ours, theirs, tolerance=NEAR):
    """Each tensor's difference is small beside its largest element."""
    assert set(ours) == set(theirs)
    for name, x in ours.items():
        x, y = np.asarray(x), np.asarray(theirs[name])
        assert x.shape == y.shape
        assert np.all(np.isfinite(y))
        assert np.abs(x - y).max(initial=0) <= tolerance * max(np.abs(y).max(initial=0), 1e-3), name


# ---- pure, and the same as the Optimizer ----------------------------------------------------------------------------


def on_backends(test):
    """Every row on NumPy, and the first of each rule on the other libraries."""
    rows = [("numpy", *row) for row in ALL]
    rows += [
        (library, name, made[0]) for library in ("array_api_strict", "torch", "jax") for name, made in CASES.items()
    ]
    ids = [f"{library} {IDS[ALL.index((name, options))]}" for library, name, options in rows]
    return pytest.mark.parametrize(("library", "name", "options"), rows, ids=ids)(test)


@on_backends
def test_nothing_that_is_given_is_written(library, name, options):
    backend, rule = BACKENDS[library], make(name, options)
    params, grads = to(backend, tree()), to(backend, tree(1))
    state = rule.init(params)
    for _ in range(2):
        before = copy.deepcopy((state, {k: backend.numpy(x).tobytes() for k, x in {**params, **grads}.items()}))
        slots = {
            k: {n: backend.numpy(x).tobytes() for n, x in s.items() if n != "t"} for k, s in state["tensors"].items()
        }
        new_params, new_state = ao.update(rule, params, grads, state)
        assert {k: backend.numpy(x).tobytes() for k, x in {**params, **grads}.items()} == before[1]
        assert [s["t"] for s in state["tensors"].values()] == [s["t"] for s in before[0]["tensors"].values()]
        assert state["step"] == before[0]["step"] == new_state["step"] - 1
        for k, s in state["tensors"].items():
            assert {n: backend.numpy(x).tobytes() for n, x in s.items() if n != "t"} == slots[k]
        assert all(new_params[k] is not x for k, x in params.items() if k != "empty")
        params, state = new_params, new_state


@on_backends
def test_it_is_what_the_optimizer_does(library, name, options):
    backend, rule = BACKENDS[library], make(name, options)
    params, grads = to(backend, tree()), [to(backend, tree(k)) for k in (1, 2, 3)]
    grads[1]["b"] = None
    opt, state = ao.Optimizer(to(backend, tree()), rule, engine="array_api"), rule.init(params)
    for g in grads:
        opt.step(g)
        params, state = ao.update(rule, params, g, state)
    assert state["step"] == opt.step_count == 3
    for k, x in params.items():
        np.testing.assert_array_equal(backend.numpy(x), backend.numpy(opt.params[k]), strict=True)
        assert set(state["tensors"][k]) == set(opt.state[k])
        for slot, y in state["tensors"][k].items():
            if slot == "t":
                assert y == opt.state[k]["t"] == {"b": 2}.get(k, 3)
            else:
                np.testing.assert_array_equal(backend.numpy(y), backend.numpy(opt.state[k][slot]), strict=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_dtypes_are_kept(backend, dtype):
    if not backend.has(dtype):
        pytest.skip(f"{backend.name} has no {dtype}")
    p = backend.array([1.0, -2.0], dtype)
    q, state = run(ao.AdamW(lr=0.125), p, backend.array([0.5, 2.0], dtype))
    assert q.dtype == p.dtype
    low = dtype in ("float16", "bfloat16")
    assert str(state["tensors"]["param"]["m"].dtype).endswith("float32" if low else dtype)
    assert str(state["tensors"]["param"]["v"].dtype).endswith("float32")
    np.testing.assert_allclose(backend.numpy(q).astype("complex128").real, [0.625, -2.375], rtol=0.02)


@pytest.mark.parametrize("state_dtype", [None, "int8"])
def test_numbers_stay_arrays_without_axes(state_dtype):
    """NumPy's operations return scalars for these."""
    rule, kinds = ao.AdamW(lr=0.1, ema_decay=0.5, state_dtype=state_dtype), set()
    for dtype in ("float16", "float32", "complex64"):
        q, state = run(rule, np.ones((), dtype), np.ones((), dtype))
        kinds |= {type(q), *(type(x) for slot, x in state["tensors"]["param"].items() if slot != "t")}
    assert kinds == {np.ndarray}


def test_state_is_a_plain_tree():
    rule = ao.LAMB()
    state = rule.init({"w": np.ones((2, 3), "float16"), "b": [np.ones(1)]})
    made = [("w", (2, 3), "float32"), ("b.0", (1,), "float64")]
    expected = {name: {"t": 0, "m": np.zeros(shape, x), "v": np.zeros(shape, x)} for name, shape, x in made}
    expected["w"]["master"] = np.ones((2, 3), "float32")
    np.testing.assert_equal(state, {"step": 0, "tensors": expected})
    np.testing.assert_equal(ao.init(rule, {"w": np.ones((2, 3), "float16"), "b": [np.ones(1)]}), state)
    assert [state["tensors"][name]["v"].dtype for name, *_ in made] == [x for *_, x in made]
    assert ao.SGD(lr=1).init(np.ones(2)) == {"step": 0, "tensors": {"param": {"t": 0}}}


@pytest.mark.parametrize(
    ("params", "new"),
    [
        (np.ones(2), np.zeros(2)),
        ([np.ones(1), (np.ones(2),)], [np.zeros(1), (np.zeros(2),)]),
        (Layer(np.ones(2), np.ones(1)), Layer(np.zeros(2), np.zeros(1))),
        (OrderedDict(z=np.ones(1), a=[]), OrderedDict(z=np.zeros(1), a=[])),
        ({"a": None, "b": [None, np.ones(1)]}, {"a": None, "b": [None, np.zeros(1)]}),
    ],
    ids=["lone", "nested", "namedtuple", "ordered", "None"],
)
def test_trees_keep_their_structure(params, new):
    made, _ = run(ao.SGD(lr=1), params, params, steps=1)
    assert repr(made) == repr(new)
    assert type(made) is type(new)


def test_gradients_that_are_none_leave_a_tensor_and_its_count_as_they_are():
    rule, p = ao.LAMB(), {"a": np.ones(2), "b": np.ones(2)}
    state = rule.init(p)
    new, after = ao.update(rule, p, {"a": np.ones(2), "b": None}, state)
    assert new["b"] is p["b"]
    assert after["tensors"]["b"] is state["tensors"]["b"]
    assert (after["tensors"]["a"]["t"], after["tensors"]["b"]["t"], after["step"]) == (1, 0, 1)


def test_groups():
    groups = {"*.b": {"lr": 1.0}, "x": {"amsgrad": True, "lr": [0.5, 0.25]}}
    params = {"l": {"b": np.ones(2), "w": np.ones(2)}, "x": np.ones(2)}
    grads = {"l.b": np.ones(2), "l.w": np.ones(2), "x": np.ones(2)}
    rule = ao.AdamW(lr=0.125, weight_decay=0.0, eps=1e-30)
    state = rule.init(params, groups=groups)
    assert "v_max" in state["tensors"]["x"]
    assert "v_max" not in state["tensors"]["l.b"]
    opt = ao.Optimizer(copy.deepcopy(params), rule, groups=groups, engine="array_api")
    for _ in range(2):
        params, state = ao.update(rule, params, grads, state, groups=groups)
        opt.step(grads)
    np.testing.assert_allclose([params["l"]["b"][0], params["l"]["w"][0], params["x"][0]], [-1, 0.75, 0.25], rtol=1e-12)
    assert opt.params["x"].tobytes() == params["x"].tobytes()


# ---- JAX: jit and scan ----------------------------------------------------------------------------------------------


@quick_of(ALL)
def test_one_compilation_serves_all_steps(name, options):
    rule, traces = make(name, options), []

    @jax.jit
    def step(params, grads, state):
        traces.append(1)
        return ao.update(rule, params, grads, state)

    params, expected = to_jax(tree()), tree()
    state, plain = rule.init(params), rule.init(expected)
    for k in range(5):
        params, state = step(params, to_jax(tree(k)), state)
        expected, plain = ao.update(rule, expected, tree(k), plain)
    assert len(traces) == 1
    assert_close(params, expected, 1e-11)
    assert int(state["step"]) == plain["step"] == 5
    for tensor, slots in plain["tensors"].items():
        assert_close(state["tensors"][tensor], slots, 1e-11)


VALUES = [0.5, 0.25, 0.125, 0.75]
TRACEABLE = {
    "list": VALUES,
    "NumPy array": np.asarray(VALUES),
    "JAX array": jnp.asarray(VALUES),
    "schedule": ao.schedules.PiecewiseConstant([1, 2, 3], VALUES),
    "product": ao.schedules.PiecewiseConstant([1, 2, 3], [2 * x for x in VALUES]) * 0.5,
    "function": lambda s: jnp.asarray(VALUES)[s],
}


@pytest.mark.parametrize("field", ["lr", "momentum", "weight_decay"])
@pytest.mark.parametrize("form", TRACEABLE)
def test_schedules_and_sequences_are_traced(form, field):
    options = {"lr": 0.1, "momentum": 0.5}
    rule, traces = ao.SGD(**options | {field: TRACEABLE[form]}), []

    @jax.jit
    def step(p, state):
        traces.append(1)
        return ao.update(rule, p, jnp.asarray([1.0, -2.0]), state)

    p = jnp.asarray([3.0, 4.0])
    state, flat, slots = rule.init(p), [3.0, 4.0], {}
    for s, x in enumerate(VALUES):
        p, state = step(p, state)
        flat, slots = witness.step("SGD", options | {field: x}, (2,), flat, [1.0, -2.0], slots, s + 1)
        np.testing.assert_allclose(p, flat, rtol=1e-6)
    assert len(traces) == 1


def test_a_sequence_that_runs_out_gives_nan_where_nothing_can_be_raised():
    rule = ao.SGD(lr=[0.5, 0.25])
    step = jax.jit(lambda p, state: ao.update(rule, p, jnp.ones(2), state))
    p = jnp.ones(2)
    state = rule.init(p)
    for expected in (0.5, 0.25, math.nan, math.nan):
        p, state = step(p, state)
        np.testing.assert_array_equal(p, [expected] * 2)


@few_of_each
def test_scan_over_steps(name, options):
    rule, params = make(name, options), to_jax(tree())
    stacked = to_jax({k: np.stack([tree(seed)[k] for seed in (1, 2, 3)]) for k in params})

    def body(carry, g):
        carry = ao.update(rule, carry[0], g, carry[1])
        return carry, carry[1]["step"]

    (result, state), steps = jax.lax.scan(body, (params, rule.init(params)), stacked)
    assert steps.tolist() == [1, 2, 3]
    assert [int(s["t"]) for s in state["tensors"].values()] == [3] * len(params)
    expected, plain = tree(), rule.init(tree())
    for k in (1, 2, 3):
        expected, plain = ao.update(rule, expected, tree(k), plain)
    assert_close(result, expected, 1e-11)


def test_none_and_groups_under_jit():
    rule, groups = ao.LAMB(), {"b": {"lr": [0.1, 0.2], "adapt": False}}

    @jax.jit
    def step(params, g, state):
        return ao.update(rule, params, {"w": g, "b": g}, state, groups=groups)

    @jax.jit
    def half(params, g, state):
        return ao.update(rule, params, {"w": None, "b": g}, state, groups=groups)

    params = {"w": jnp.ones(2), "b": jnp.ones(2)}
    opt = ao.Optimizer(dict(params), rule, groups=groups)
    g = jnp.asarray([1.0, -3.0])
    params, state = half(params, g, ao.init(rule, params, groups=groups))
    params, state = step(params, g, state)
    opt.step({"w": None, "b": g})
    opt.step({"w": g, "b": g})
    assert (int(state["tensors"]["w"]["t"]), int(state["tensors"]["b"]["t"])) == (1, 2)
    assert_close(params, opt.params)


# ---- derivatives ----------------------------------------------------------------------------------------------------

DERIVED = {"w": (2, 3), "b": (3,)}
SMOOTH = [(name, options) for name, options in ALL if not options.get("warmup_init")]  # its steps of 1e-6 round away
smooth = pytest.mark.parametrize(("name", "options"), SMOOTH, ids=[IDS[ALL.index(row)] for row in SMOOTH])


def direction(seed, arrays):
    rng = np.random.default_rng(seed)
    return {name: np.asarray(rng.standard_normal(np.shape(x))) for name, x in arrays.items()}


def along(arrays, step, towards):
    return {name: x + step * towards[name] for name, x in arrays.items()}


def dot(a, b):
    return sum(float(np.sum(np.asarray(a[name]) * np.asarray(b[name]))) for name in a)


def difference(f, x, h=1e-6):
    """The derivative of f at x by central differences."""
    return float((f(x + h) - f(x - h)) / (2 * h))


@quick_of(SMOOTH, FEW)
def test_jax_differentiates_through_steps(name, options):
    rule, p, g = make(name, options), tree(shapes=DERIVED), tree(1, DERIVED)

    def loss(p, g):
        return total(run(rule, p, g, steps=2)[0])

    by_p, by_g = jax.grad(loss, (0, 1))(to_jax(p), to_jax(g))
    for towards, found, f in [
        (direction(5, p), by_p, lambda e, d: loss(along(p, e, d), g)),
        (direction(6, g), by_g, lambda e, d: loss(p, along(g, e, d))),
    ]:
        expected = difference(lambda e: f(e, towards), 0.0)  # noqa: B023 - called at once
        assert dot(found, towards) == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert dot(by_p, by_p) > 0


@smooth
def test_pytorch_differentiates_through_steps(name, options):
    rule, p, g = make(name, options), tree(shapes=DERIVED), tree(1, DERIVED)

    def loss(p, g):
        return total(run(rule, p, g, steps=2)[0])

    leaves = to_torch(p, requires_grad=True), to_torch(g, requires_grad=True)
    loss(*leaves).backward()
    for towards, part, f in [
        (direction(5, p), leaves[0], lambda e, d: loss(along(p, e, d), g)),
        (direction(6, g), leaves[1], lambda e, d: loss(p, along(g, e, d))),
    ]:
        expected = difference(lambda e: f(e, towards), 0.0)  # noqa: B023 - called at once
        assert dot({k: x.grad for k, x in part.items()}, towards) == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert all(x.grad is not None for x in leaves[0].values())


FIELDS = {
    "LAMB": {"lr": 0.1, "beta1": 0.8, "beta2": 0.7, "eps": 0.01, "weight_decay": 0.1, "clip_value": 0.5},
    "LANS": {"lr": 0.1, "beta1": 0.8, "beta2": 0.7, "eps": 0.01, "weight_decay": 0.1, "max_norm": 1.1},
    "CAME": {"lr": 0.1, "beta1": 0.8, "beta2": 0.7, "beta3": 0.6, "eps2": 0.01, "clip_threshold": 0.7},
    "LARS": {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.1, "trust_coefficient": 0.1, "eps": 0.01},
    "AdamW": {"lr": 0.1, "beta1": 0.8, "beta2": 0.7, "eps": 0.01, "weight_decay": 0.1},
    "Adam": {"lr": 0.1, "beta1": 0.8, "beta2": 0.7, "eps": 0.01, "weight_decay": 0.1},
    "SGD": {"lr": 0.1, "momentum": 0.8, "dampening": 0.1, "weight_decay": 0.1},
    "Adafactor": {"lr": 0.1, "beta1": 0.8, "decay_rate": 0.7, "eps1": 0.01, "eps_scale": 3.0, "clip_threshold": 0.7},
    "Lion": {"lr": 0.1, "weight_decay": 0.1},
    "RMSprop": {"lr": 0.1, "alpha": 0.8, "momentum": 0.5, "eps": 0.01, "weight_decay": 0.1, "initial_scale": 0.5},
    "NAdam": {"lr": 0.1, "beta1": 0.8, "beta2": 0.7, "eps": 0.01, "weight_decay": 0.1, "momentum_decay": 0.5},
    "RAdam": {"lr": 0.1, "beta1": 0.8, "weight_decay": 0.1},
    "Adan": {"lr": 0.1, "beta1": 0.8, "beta2": 0.7, "beta3": 0.6, "eps": 0.01, "weight_decay": 0.1},
    "AdEMAMix": {"lr": 0.1, "beta1": 0.8, "beta2": 0.7, "beta3": 0.9, "eps": 0.01, "alpha": 2.0, "beta3_warmup": 4.5},
    "ScheduleFreeAdamW": {"lr": 0.1, "beta1": 0.8, "beta2": 0.7, "eps": 0.01, "weight_decay": 0.1, "r": 0.5},
    "AdamH": {"lr": 0.1, "beta1": 0.8, "beta2": 0.7, "eps": 0.01, "radius": 2.0},
    "AdaBelief": {"lr": 0.1, "beta1": 0.8, "beta2": 0.7, "eps": 0.01, "eps_root": 0.01, "weight_decay": 0.1},
    "Sophia": {"lr": 0.1, "beta1": 0.8, "gamma": 0.5, "eps": 3.0, "clip_update": 0.1, "weight_decay": 0.1},
    "FISTA": {"lr": 0.1},
}
HYPERS = [(name, field) for name, fields in FIELDS.items() for field in fields]


@pytest.mark.parametrize(("name", "field"), marked(HYPERS, lambda name, field: field == "lr"))
def test_hypergradients(name, field):
    """The derivative by a hyper-parameter over three unrolled steps: by JAX, by PyTorch, by differences."""
    fixed = {"relative_step": False} if name == "Adafactor" else {}
    plain = getattr(ao, name)(**FIELDS[name], **fixed)
    p, g = tree(shapes=DERIVED), tree(1, DERIVED)

    def loss(x, p=p, g=g):
        return total(run(dataclasses.replace(plain, **{field: x}), p, g, shift=0.3)[0])

    at = FIELDS[name][field]
    expected = difference(loss, at, 1e-6 * at)
    assert abs(expected) > 1e-8
    by_jax = jax.grad(loss)(at, to_jax(p), to_jax(g))
    x = torch.tensor(at, dtype=torch.float64, requires_grad=True)
    loss(x, to_torch(p), to_torch(g)).backward()
    assert [float(by_jax), x.grad.item()] == pytest.approx([expected] * 2, rel=1e-5)


def test_hypergradients_of_a_learning_rate_that_trains():
    """Through twenty steps on a quadratic, where the end is known: x (1 - lr·a)^20."""
    a, x0, steps = 0.7, 3.0, 20

    def end(lr, x):
        rule = ao.SGD(lr=lr)
        state = rule.init(x)
        for _ in range(steps):
            x, state = ao.update(rule, x, a * x, state)
        return x

    exact = x0 * steps * (1 - 0.1 * a) ** (steps - 1) * -a
    assert float(jax.jit(jax.grad(end))(0.1, jnp.asarray(x0))) == pytest.approx(exact, rel=1e-12)
    lr = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    end(lr, torch.tensor(x0, dtype=torch.float64)).backward()
    assert lr.grad.item() == pytest.approx(exact, rel=1e-12)
    second = jax.grad(jax.grad(end))(0.1, jnp.asarray(x0))
    assert float(second) == pytest.approx(x0 * steps * (steps - 1) * (1 - 0.1 * a) ** (steps - 2) * a * a, rel=1e-12)


@pytest.mark.parametrize("library", ["jax", "torch"])
@quick_of(ALL, FEW)
def test_zeros_differentiate_to_finite_values(name, options, library):
    """In float32, whose range ends at 1e-38."""
    rule = make(name, options)

    def loss(p, g):
        return total(run(rule, p, g, steps=2)[0])

    for p_value, g_value in [(0, 0), (0, 0.25), (0.5, 0)]:
        host = [{k: np.full(shape, x, "float32") for k, shape in DERIVED.items()} for x in (p_value, g_value)]
        if library == "jax":
            found = [np.asarray(x) for part in jax.grad(loss, (0, 1))(*map(to_jax, host)) for x in part.values()]
        else:
            leaves = [{k: torch.tensor(x, requires_grad=True) for k, x in part.items()} for part in host]
            loss(*leaves).backward()
            found = [x.grad.numpy() for part in leaves for x in part.values()]
        assert len(found) == 4
        assert all(x.dtype == "float32" and np.isfinite(x).all() for x in found), (p_value, g_value)
        assert any(x.any() for x in found)


def test_pytorch_parameters_with_gradients_stay_in_the_graph():
    w = torch.ones(2, requires_grad=True)
    new, _ = run(ao.SGD(lr=0.5), {"w": w}, {"w": torch.ones(2)}, steps=1)
    assert new["w"].grad_fn is not None
    assert w.tolist() == [1, 1]


# ---- many at once ---------------------------------------------------------------------------------------------------


@few_of_each
def test_vmap_over_an_ensemble(name, options):
    rule, members = make(name, options), 4
    params, grads = (
        to_jax({name: np.stack([tree(k + first)[name] for k in range(members)]) for name in SHAPES}) for first in (0, 9)
    )
    states = jax.vmap(rule.init)(params)
    step = jax.jit(jax.vmap(lambda p, g, s: ao.update(rule, p, g, s)))
    for _ in range(2):
        params, states = step(params, grads, states)
    for k in range(members):
        alone, _ = run(rule, tree(k), tree(k + 9), steps=2)
        assert_close({n: x[k] for n, x in params.items()}, alone, 1e-11)


def test_vmap_over_learning_rates():
    p, g, lrs = jnp.asarray([1.0, 2.0]), jnp.asarray([0.5, -1.0]), jnp.asarray([0.1, 0.2, 0.4])

    def once(lr):
        rule = ao.SGD(lr=lr)
        return ao.update(rule, p, g, rule.init(p))[0]

    np.testing.assert_allclose(jax.vmap(once)(lrs), [np.asarray(p) - lr * np.asarray(g) for lr in (0.1, 0.2, 0.4)])
    np.testing.assert_allclose(jax.vmap(jax.grad(lambda lr: once(lr).sum()))(lrs), [0.5] * 3)


def test_pytorchs_function_transforms():
    p, g = torch.tensor([1.0, 2.0]), torch.tensor([0.5, -1.0])

    def once(lr, p):
        rule = ao.SGD(lr=lr)
        return ao.update(rule, p, g, rule.init(p))[0]

    torch.testing.assert_close(torch.func.grad(lambda lr: once(lr, p).sum())(torch.tensor(0.1)), torch.tensor(0.5))
    torch.testing.assert_close(torch.func.jacrev(lambda p: once(0.5, p))(p), torch.eye(2))
    lrs = torch.tensor([0.1, 0.2])
    torch.testing.assert_close(torch.func.vmap(lambda lr: once(lr, p))(lrs), p - lrs[:, None] * g)


def test_arrays_of_other_libraries_stay_theirs(backend):
    new, state = run(ao.CAME(lr=0.1), to(backend, tree()), to(backend, tree(1)))
    arrays = [*new.values(), *(x for s in state["tensors"].values() for n, x in s.items() if n != "t")]
    assert len(arrays) > 10
    for x in arrays:
        assert array_api_compat.array_namespace(x) is array_api_compat.array_namespace(backend.array([1.0]))


# ---- statistics ------------------------------------------------------------------------------------------------------


def test_statistics_are_those_of_the_optimizer_and_change_nothing():
    rule, params = ao.LAMB(lr=0.1), {"w": np.full((2, 3), 2.0), "b": np.ones(3), "left": np.ones(2)}
    grads = {"w": np.full((2, 3), 0.5), "b": np.ones(3), "left": None}
    state = rule.init(params)
    new, after, stats = ao.update(rule, params, grads, state, stats=True)
    plain, same = ao.update(rule, params, grads, state)
    opt = ao.Optimizer({name: p.copy() for name, p in params.items()}, rule, engine="array_api", stats=True)
    opt.step(grads)
    assert set(stats) == {"w", "b"}
    assert {name: {key: float(x) for key, x in found.items()} for name, found in stats.items()} == opt.stats.read()
    assert all(np.array_equal(new[name], plain[name]) for name in params)
    assert np.array_equal(after["tensors"]["w"]["v"], same["tensors"]["w"]["v"])
    with pytest.raises(TypeError, match="update: `stats` must be True or False; got 1"):
        ao.update(rule, params, grads, state, stats=1)


def test_statistics_can_be_traced():
    rule, params = ao.LAMB(lr=0.1), {"w": jnp.full((2, 3), 2.0)}
    state = rule.init(params)
    _, _, stats = jax.jit(lambda p, s: ao.update(rule, p, p, s, stats=True))(params, state)
    _, _, plain = ao.update(rule, params, params, state, stats=True)
    for key, x in plain["w"].items():
        np.testing.assert_allclose(stats["w"][key], x, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_infinity_and_nan_are_data_and_no_warning(dtype):
    """As for the Optimizer; NumPy is asked to raise."""
    bad = np.array([np.inf, -np.inf, np.nan, np.finfo(dtype).max, np.finfo(dtype).tiny], dtype)
    for rule in (ao.LAMB(ema_decay=0.5), ao.ScheduleFreeAdamW()):
        with np.errstate(all="raise"):
            p = np.ones(5, dtype)
            state = rule.init(p)
            for skip in (True, False):
                p, state = ao.update(rule, p, bad, state, clip_norm=1.0, skip_nonfinite=skip, stats=True)[:2]
            opt = ao.Optimizer(np.full(5, np.finfo(dtype).tiny), rule, engine="numpy", clip_norm=1.0)
            opt.step(bad)
            opt.averaged()

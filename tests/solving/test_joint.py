"""Rules to which all tensors are one unknown: the same steps as of one array that has all their elements."""

import ml_dtypes
import numpy as np
import pytest
import torch

import arrayopt as ao
import arrayopt.torch
from tests.support.engines import EVERY, SLOW
from tests.support.ranks import contents, differing
from tests.support.slow import marked

some_engines = pytest.mark.parametrize("engine", marked([(e,) for e in EVERY], lambda e: e in ("numpy", "cpp")))
H = 10.0 ** np.random.default_rng(0).uniform(-1, 1, 30)
SHAPES = {"w": (4, 5), "b": (9,), "number": ()}


def f(x):
    """A function that is not quadratic, and mixes all its unknowns; and its gradient."""
    value = (H * x**2 + 0.05 * np.cos(x)).sum() + (x.sum() - 3.0) ** 4
    return value, 2 * H * x - 0.05 * np.sin(x) + 4 * (x.sum() - 3.0) ** 3


def tree(x):
    """One array, as several."""
    ends = np.cumsum([int(np.prod(shape)) for shape in SHAPES.values()])
    parts = np.split(x, ends[:-1])
    return {name: part.reshape(shape).copy() for (name, shape), part in zip(SHAPES.items(), parts, strict=True)}


def flat(params):
    return np.concatenate([np.reshape(x, -1) for x in params.values()])


def several(rule, engine, valued, *, steps=12, comm=None, start=None, **options):
    """The points of a run over several arrays; `valued` tells which steps are given the value."""
    start = tree(np.ones(30)) if start is None else start
    opt = ao.Optimizer(start, rule, engine=engine, comm=comm, **options)
    points = []
    for k in range(steps):
        value, grad = f(flat(opt.params))
        opt.step(tree(grad), value=value if valued(k) else None)
        points.append(flat(opt.params))
    return opt, np.array(points)


def alone(rule, valued, steps=12):
    """The points of a run over one array."""
    opt, points = ao.Optimizer(np.ones(30), rule, engine="array_api"), []
    for k in range(steps):
        value, grad = f(opt.params)
        opt.step(grad, value=value if valued(k) else None)
        points.append(np.array(opt.params))
    return np.array(points)


ALL, NONE, SOME = (lambda k: True), (lambda k: False), (lambda k: k % 6 > 2)
ROWS = {
    "line search": (ao.LBFGS(memory=3), ALL),
    "no value": (ao.LBFGS(memory=3, lr=0.9), NONE),
    "some values": (ao.LBFGS(memory=3, lr=0.9), SOME),
    "no line search": (ao.LBFGS(memory=3, line_search=None), ALL),
    "CG": (ao.CG(), ALL),
    "SPG": (ao.SPG(), ALL),
}


@pytest.mark.parametrize(
    ("engine", "row"),
    marked([(e, r) for e in EVERY for r in ROWS], lambda e, r: e not in SLOW and ROWS[r][1] in (ALL, SOME)),
)
def test_several_arrays_are_one_unknown(engine, row):
    rule, valued = ROWS[row]
    _, points = several(rule, engine, valued)
    np.testing.assert_allclose(points, alone(rule, valued), rtol=1e-8, atol=1e-8)
    assert f(points[-1])[0] < 0.8 * f(np.ones(30))[0]


@some_engines
def test_without_values_it_is_pytorchs(engine):
    opt = ao.Optimizer(tree(np.ones(30)), ao.LBFGS(lr=0.8, memory=5), engine=engine)
    theirs = [torch.nn.Parameter(torch.tensor(x)) for x in tree(np.ones(30)).values()]
    options = {"lr": 0.8, "max_iter": 1, "history_size": 5, "tolerance_grad": 0, "tolerance_change": 0}
    original = torch.optim.LBFGS(theirs, **options)

    def closure():
        grad = tree(f(np.concatenate([x.detach().numpy().reshape(-1) for x in theirs]))[1])
        for x, g in zip(theirs, grad.values(), strict=True):
            x.grad = torch.tensor(g)
        return torch.tensor(0.0)

    for _ in range(25):
        opt.step(tree(f(flat(opt.params))[1]))
        original.step(closure)
        for x, y in zip(opt.params.values(), theirs, strict=True):
            np.testing.assert_allclose(x, y.detach().numpy(), rtol=1e-8, atol=1e-9)


def test_bytes_of_steps_with_and_without_a_value():
    opt = ao.Optimizer(tree(np.ones(30, np.float32)), ao.LBFGS(memory=5), engine="cpp")
    without, with_value = opt.explain().split("with a value:")
    assert "108 bytes per float32 parameter" in without
    assert "116 bytes per float32 parameter" in with_value
    assert "with a value:" not in ao.Optimizer(np.ones(3), ao.LBFGS(line_search=None), engine="cpp").explain()


@pytest.mark.parametrize("engine", ["array_api", "numpy", "cpp"])
def test_a_group_that_is_not_joint_is_apart(engine):
    opt = ao.Optimizer(tree(np.ones(30)), ao.LBFGS(memory=3), groups={"b": {"joint": False}}, engine=engine)
    alone = ao.Optimizer(tree(np.ones(30))["b"], ao.LBFGS(memory=3), engine=engine)
    for _ in range(5):
        value, grad = f(flat(opt.params))
        grads = tree(grad)
        alone.step(grads["b"], value=value)
        opt.step(grads, value=value)
        np.testing.assert_allclose(opt.params["b"], alone.params, rtol=1e-12)


@pytest.mark.parametrize("groups", [{"b": {"lr": 0.5}}, {"b": {"curvature": 0.5}}, {"b": {"first_step": 2.0}}])
def test_a_line_search_has_the_same_numbers_in_all_groups(groups):
    (name,) = groups["b"]
    opt = ao.Optimizer(tree(np.ones(30)), ao.LBFGS(memory=3), groups=groups)
    value, grad = f(flat(opt.params))
    with pytest.raises(ValueError, match=f"must have the same `{name}`; got"):
        opt.step(tree(grad), value=value)
    opt.step(tree(grad))  # each tensor has a length of its own without a search
    params = tree(np.ones(30))
    state = ao.init(ao.LBFGS(), params, groups=groups)
    with pytest.raises(ValueError, match=f"must have the same `{name}`; got"):
        ao.update(ao.LBFGS(), params, tree(grad), state, groups=groups, value=value)


@pytest.mark.parametrize("row", ["line search", "no value", "CG"])
@pytest.mark.parametrize("engine", ["array_api", "cpp"])
def test_other_company_begins_anew(engine, row):
    rule, valued = ROWS[row]
    opt, _ = several(rule, engine, valued, steps=5)
    _, grad = f(flat(opt.params))
    grads = tree(grad)
    grads["b"] = None
    opt.step(grads, value=1.0 if row != "no value" else None)
    here = {name: np.array(x) for name, x in opt.params.items()}
    _, fresh = several(rule, engine, valued, steps=6, start={name: x.copy() for name, x in here.items()})
    for k in range(6):  # all together again
        value, grad = f(flat(opt.params))
        opt.step(tree(grad), value=value if valued(k) else None)
        np.testing.assert_allclose(flat(opt.params), fresh[k], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("engine", "ranks", "row"),
    marked(
        [(e, n, r) for e in EVERY for n in (2, 3, 4) for r in ("line search", "some values", "CG")],
        lambda e, n, r: e not in SLOW and (n, r) in ((2, "some values"), (4, "CG")),
    ),
)
def test_ranks_give_the_same_bits(engine, ranks, row):
    rule, valued = ROWS[row]
    expected = contents(several(rule, engine, valued, accumulate=1)[0])

    def rank(comm):
        return differing(expected, contents(several(rule, engine, valued, comm=comm)[0]))

    assert not [name for found in ao.ranks.run(ranks, rank) for name in found]


@some_engines
def test_layers_of_the_same_number_are_one_unknown(engine):
    """Each layer of one tensor is a problem together with that layer of the other."""
    start = np.linspace(0.5, 2.0, 90).reshape(3, 30)
    opt = ao.Optimizer({"a": start[:, :20].copy(), "b": start[:, 20:].copy()}, ao.LBFGS(stacked=True), engine=engine)
    apart = [ao.Optimizer(x.copy(), ao.LBFGS(), engine="array_api") for x in start]
    for k in range(8):
        found = [f(np.concatenate([opt.params["a"][i], opt.params["b"][i]])) for i in range(3)]
        grads = np.array([g for _, g in found])
        values = np.array([v for v, _ in found]) if k % 4 else None
        opt.step({"a": grads[:, :20].copy(), "b": grads[:, 20:].copy()}, value=values)
        for i, one in enumerate(apart):
            value, grad = f(one.params)
            one.step(grad, value=value if k % 4 else None)
            both = np.concatenate([opt.params["a"][i], opt.params["b"][i]])
            np.testing.assert_allclose(both, one.params, rtol=1e-7, atol=1e-9)


def test_it_is_the_functional_form_and_a_resumed_run(tmp_path):
    for valued in (ALL, SOME):
        rule = ao.LBFGS(memory=3)
        opt, points = several(rule, "numpy", valued)
        params, state = tree(np.ones(30)), ao.init(rule, tree(np.ones(30)))
        for k in range(12):
            value, grad = f(flat(params))
            params, state = ao.update(rule, params, tree(grad), state, value=value if valued(k) else None)
            np.testing.assert_allclose(flat(params), points[k], rtol=1e-9, atol=1e-9)
        half, _ = several(rule, "numpy", valued, steps=6)
        half.save(tmp_path / "half")
        other = ao.Optimizer(half.params, rule, engine="numpy")
        other.load(tmp_path / "half")
        for k in range(6, 12):
            value, grad = f(flat(other.params))
            other.step(tree(grad), value=value if valued(k) else None)
        assert not differing(contents(opt), contents(other))


@some_engines
def test_each_tensor_is_a_problem_of_its_own(engine):
    start = tree(np.linspace(0.5, 2.0, 30))
    opt = ao.Optimizer(start, ao.LBFGS(joint=False, line_search=None), engine=engine)
    apart = {
        name: ao.Optimizer(np.copy(x), ao.LBFGS(line_search=None), engine="array_api") for name, x in start.items()
    }
    for _ in range(6):
        grads = {name: 3.0 * x + x**3 for name, x in opt.params.items()}
        opt.step(grads)
        for name, one in apart.items():
            one.step(3.0 * one.params + one.params**3)
            np.testing.assert_allclose(opt.params[name], one.params, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("row", marked([(row,) for row in ROWS], lambda row: row == "CG"))
def test_kernels_do_the_same(cupy, row):
    rule, valued = ROWS[row]
    points = alone(rule, valued)
    opt = ao.Optimizer({name: cupy.asarray(x) for name, x in tree(np.ones(30)).items()}, rule, engine="cupy")
    for k in range(12):
        value, grad = f(flat({name: x.get() for name, x in opt.params.items()}))
        grads = {name: cupy.asarray(g) for name, g in tree(grad).items()}
        opt.step(grads, value=value if valued(k) else None)
        found = flat({name: x.get() for name, x in opt.params.items()})
        np.testing.assert_allclose(found, points[k], rtol=1e-8, atol=1e-8)


def bowl(x):
    """The gradient of a quadratic function, and its value."""
    wide = x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)
    weights = np.arange(1, x.size + 1).reshape(x.shape)
    return (weights * wide).astype(x.dtype), float((weights * abs(wide) ** 2).sum()) / 2


@pytest.mark.parametrize(
    ("engine", "dtype"),
    marked(
        [(e, d) for e in EVERY for d in ("float32", "complex64", "complex128", "float16", ml_dtypes.bfloat16)],
        lambda e, d: e == "numpy" and d in ("complex64", ml_dtypes.bfloat16),
    ),
)
def test_arrays_of_any_dtype_and_size(engine, dtype):
    shapes = {"w": (3, 4), "number": (), "empty": (0, 3), "b": (5,)}
    start = {name: np.ones(shape).astype(dtype) for name, shape in shapes.items()}
    opt = ao.Optimizer(start, ao.LBFGS(memory=3), engine=engine)
    for k in range(25):
        found = {name: bowl(x) for name, x in opt.params.items()}
        value = sum(value for _, value in found.values())
        opt.step({name: g for name, (g, _) in found.items()}, value=value if k % 5 else None)
    assert value < 1e-8


def test_tensors_of_two_libraries_and_dtypes_are_one_unknown():
    start = {"a": np.ones(4), "b": torch.ones(5, dtype=torch.float64), "c": np.ones(3, np.float32)}
    opt = ao.Optimizer(start, ao.LBFGS(memory=3))
    for k in range(20):
        found = {name: bowl(np.asarray(x)) for name, x in opt.params.items()}
        value = sum(value for _, value in found.values())
        grads = {name: torch.tensor(g) if name == "b" else g for name, (g, _) in found.items()}
        opt.step(grads, value=value if k % 5 else None)
    assert value < 1e-12
    assert len({float(opt.state[name]["trials"]) for name in "abc"}) == 1


def test_in_a_loop_of_pytorch_the_loss_is_the_value():
    params = [torch.nn.Parameter(torch.tensor(x)) for x in tree(np.ones(30)).values()]
    opt = arrayopt.torch.optimizer(ao.LBFGS)(params, memory=3)
    points = alone(ROWS["line search"][0], ALL)

    def closure():
        value, grad = f(np.concatenate([x.detach().numpy().reshape(-1) for x in params]))
        for x, g in zip(params, tree(grad).values(), strict=True):
            x.grad = torch.tensor(g)
        return torch.tensor(value, dtype=torch.float64)

    for point in points:
        opt.step(closure)
        found = np.concatenate([x.detach().numpy().reshape(-1) for x in params])
        np.testing.assert_allclose(found, point, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", ["CG", "LBFGS", "SPG"])
def test_doors_tell_another_way_to_solvers(name):
    import arrayopt.optax

    with pytest.raises(AttributeError, match=rf"use arrayopt.torch.optimizer\(arrayopt.{name}\)"):
        getattr(arrayopt.torch, name)
    with pytest.raises(AttributeError, match=rf"arrayopt.optax.transformation\(arrayopt.{name}\(\)\)"):
        getattr(arrayopt.optax, name.lower())
    assert not hasattr(arrayopt.torch, name.title())
    assert not hasattr(arrayopt.optax, "nothing")


@pytest.mark.parametrize("rule", [ao.LBFGS(memory=5), ao.LBFGS(memory=5, line_search=None), ao.CG()])
def test_in_a_loop_of_optax_the_value_is_given(rule):
    import jax
    import jax.numpy as jnp
    import optax

    from arrayopt.optax import transformation

    scale = np.arange(1.0, 31.0)

    def loss(params):
        return 0.5 * (jnp.concatenate(list(params.values())) ** 2 * scale).sum()

    tx, params = transformation(rule), {"a": jnp.ones(10), "b": jnp.ones(20)}
    state, update = tx.init(params), jax.jit(tx.update)
    opt = ao.Optimizer({name: np.asarray(x) for name, x in params.items()}, rule, engine="array_api")
    for _ in range(12):
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = update(grads, state, params, value=value)
        params = optax.apply_updates(params, updates)
        opt.step({name: np.asarray(g) for name, g in grads.items()}, value=float(value))
    for name, x in params.items():
        np.testing.assert_allclose(x, opt.params[name], rtol=1e-3, atol=1e-5)

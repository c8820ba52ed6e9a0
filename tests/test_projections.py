"""Projections: each by itself, fused, with everything around it, and on problems that SciPy's bounded solvers know."""

import pickle
from dataclasses import dataclass

import numpy as np
import pytest
import scipy.optimize

import arrayopt as ao
from arrayopt import projections as P
from arrayopt.fusion.plans import plan_for
from arrayopt.rules.names import Values
from tests.support.engines import each_compiled, each_engine, each_fused
from tests.support.optimizing import drawn

H = Values(lr=0.5)

# ---- what each does -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Below:
    """Compared by its field, and so not hashable where that is an array or a list."""

    high: object

    def __call__(self, xp, p, h):
        return xp.minimum(p, self.high)


def add_one(xp, p, h):
    return p + 1.0


@pytest.mark.parametrize(
    ("project", "before", "after"),
    [
        (P.box(-1, 2), [-3.0, 0.5, 3.0], [-1.0, 0.5, 2.0]),
        (P.box(None, 2), [-3.0, 0.5, 3.0], [-3.0, 0.5, 2.0]),
        (P.box(low=-1.0), [-3.0, 0.5, 3.0], [-1.0, 0.5, 3.0]),
        (P.box(), [-3.0, 0.5], [-3.0, 0.5]),
        (P.nonnegative, [-3.0, 0.5, -0.0], [0.0, 0.5, 0.0]),
        (P.nonnegative(), [-3.0, 0.5], [0.0, 0.5]),
        (P.ball(1.0), [3.0, -4.0], [0.6, -0.8]),
        (P.ball(9.0), [3.0, -4.0], [3.0, -4.0]),
        (P.ball(1.0, axis=-1), [[3.0, -4.0], [0.5, 0.0]], [[0.6, -0.8], [0.5, 0.0]]),
        (P.ball(1.0), [3e200, -4e200], [0.6, -0.8]),
        (P.sphere(2.0), [0.3, -0.4], [1.2, -1.6]),
        (P.sphere(), [0.0, 0.0], [0.0, 0.0]),
        (P.sphere(axis=0), [[3.0, 0.0], [4.0, 0.1]], [[0.6, 0.0], [0.8, 1.0]]),
        (P.soft_threshold(2.0), [3.0, -3.0, 0.5, -1.0], [2.0, -2.0, 0.0, 0.0]),
        (P.soft_threshold(0), [3.0, -3.0], [3.0, -3.0]),
        (P.unit_modulus, [3 + 4j, -2j, 0j], [0.6 + 0.8j, -1j, 1 + 0j]),
        (P.soft_threshold(2.0), [3j, 0.6 + 0.8j], [2j, 0j]),
        (P.support(np.array([True, False])), [3.0, -4.0], [3.0, 0.0]),
        (P.support(np.array([[True], [False]])), [[3.0, -1.0], [-4.0, np.nan]], [[3.0, -1.0], [0.0, 0.0]]),
        (P.support(np.array([False, True])), [3 + 4j, complex(-1, np.nan)], [0j, complex(-1, np.nan)]),
        (P.nonnegative, [3 - 4j, -1 + 2j, -1j], [3 + 0j, 2j, 0j]),
        (P.box(-1, 2), [3 - 4j, 0.5 + 2.5j], [2 - 1j, 0.5 + 2j]),
        (P.box(-1 - 2j, 2 + 0j), [3 - 4j, 0.5 + 2.5j], [2 - 2j, 0.5 + 0j]),
        (P.box(complex(0, -np.inf)), [-3 - 4j, 0.5 + 2.5j], [-4j, 0.5 + 2.5j]),
        (P.box(None, np.array([1 + 0j, 1j])), [3 - 4j, 0.5 + 2.5j], [1 - 4j, 1j]),
        (P.box(None, np.array([1.0, 0.0])), [3 - 4j, 0.5 + 2.5j], [1 - 4j, 0j]),
        (P.compose(P.soft_threshold(2.0), P.box(-1, 1)), [3.0, -1.5, 0.5], [1.0, -0.5, 0.0]),
        (P.compose(add_one), [3.0], [4.0]),
    ],
    ids=lambda x: x.__name__ if callable(x) and not isinstance(x, P.Projection) else repr(x).partition("<")[0],
)
def test_one(project, before, after):
    arrays = getattr(project, "arrays", {})
    with np.errstate(over="ignore"):
        h = Values(**vars(H), arrays={name: np.broadcast_to(x, np.shape(before)) for name, x in arrays.items()})
        np.testing.assert_allclose(project(np, np.array(before), h), after, rtol=1e-15)
    before, g = np.array(before), np.zeros(np.shape(before), np.array(before).dtype)
    for engine in ("array_api", "numpy"):
        p = before.copy()
        ao.Optimizer(p, ao.SGD(lr=0.5, project=project), engine=engine).step(g)
        np.testing.assert_allclose(p, after, rtol=1e-15)


@pytest.mark.parametrize(
    ("make", "kind", "says"),
    [
        (lambda: P.box("a", 1), TypeError, "box: `low` must be a number, an array of floats or None; got 'a'"),
        (lambda: P.box(np.array([1, 2])), TypeError, r"box: `low` must be .*; got <ndarray \(2,\)> of int64"),
        (lambda: P.box(1, 0), ValueError, "box: `low` must not be above `high`; got 1.0 and 0.0"),
        (lambda: P.box(np.ones(2), 0.5), ValueError, "box: `low` must not be above `high`"),
        (lambda: P.box(float("nan")), ValueError, "box: a bound must not be NaN"),
        (lambda: P.box(complex(0, np.nan)), ValueError, "box: a bound must not be NaN"),
        (lambda: P.box(3j, 2), ValueError, r"box: `low` must not be above `high`; got 3j and 2.0"),
        (
            lambda: P.support(np.ones(2)),
            TypeError,
            r"support: `mask` must be an array of booleans; got <ndarray \(2,\)> of ",
        ),
        (lambda: P.support(True), TypeError, "support: `mask` must be an array of booleans; got True"),
        (lambda: P.box(high=np.array([np.nan])), ValueError, "box: a bound must not be NaN"),
        (lambda: P.ball(0), ValueError, r"ball: `radius` must be in \(0, inf\); got 0.0"),
        (lambda: P.ball(1, axis=0.5), TypeError, "ball: `axis` must be None, an integer or a tuple of them; got 0.5"),
        (lambda: P.sphere("a"), TypeError, "sphere: `radius` must be a number"),
        (lambda: P.soft_threshold(-1), ValueError, r"soft_threshold: `l1` must be in \[0, inf\); got -1.0"),
        (lambda: P.compose(), TypeError, r"compose: pass one or more functions f\(xp, p, h\); got none"),
        (lambda: P.compose(P.box), TypeError, r"compose: pass one or more functions f\(xp, p, h\); got <class"),
        (
            lambda: ao.SGD(lr=1, project=P.box),
            TypeError,
            r"SGD: `project` must be a function f\(xp, p, h\), such as",
        ),
        (lambda: ao.SGD(lr=1, project=0.5), TypeError, "SGD: `project` must be a function"),
        (
            lambda: ao.SGD(lr=1, project=Below(np.ones(2))),
            TypeError,
            "SGD: `project` must be hashable, because rules are",
        ),
        (lambda: ao.SGD(lr=1, project=P.compose(Below([1.0]))), TypeError, "SGD: `project` must be hashable"),
    ],
)
def test_what_cannot_be_one(make, kind, says):
    with pytest.raises(kind, match=says):
        make()


@pytest.mark.filterwarnings("ignore::arrayopt.NotFusedWarning")
def test_what_a_tensor_cannot_have():
    for end in (1j, np.zeros(2, complex)):
        for project in (P.box(end), P.compose(P.nonnegative, P.box(None, end))):
            with pytest.raises(TypeError, match=r"SGD: `project` is .*, for complex parameters; 'param' is of float64"):
                ao.Optimizer(np.ones(2), ao.SGD(lr=1, project=project))
    says = r"`project` has shape \(3,\), which does not broadcast to the shape \(2,\) of 'w'; it is for other tensors"
    with pytest.raises(ValueError, match=says):
        ao.Optimizer({"w": np.ones(2)}, ao.SGD(lr=1, project=P.box(np.zeros(3))))
    p = np.ones(2)
    with pytest.raises(ValueError, match="soft_threshold: the rule must have a learning rate"):
        ao.Optimizer(p, ao.CAME(relative_step=True, project=P.soft_threshold(1.0)), engine="array_api").step(p.copy())
    with pytest.raises(ValueError, match="must keep shapes"):
        ao.Optimizer(p, ao.SGD(lr=1, project=lambda xp, p, h: xp.sum(p))).step(p.copy())
    assert p.tolist() == [1.0, 1.0]


@pytest.mark.filterwarnings("ignore::arrayopt.NotFusedWarning")
@pytest.mark.parametrize("engine", ["array_api", "numpy", "auto"])
def test_an_axis_that_a_tensor_does_not_have(engine):
    made = [P.sphere(1.0, axis=4), P.ball(1.0, axis=(0, -2)), P.compose(add_one, P.sphere(axis=1))]
    for project, axis in zip(made, (4, -2, 1), strict=True):
        with pytest.raises(ValueError, match=rf"SGD: 'w', of .* is of rank 1 and has no axis {axis}, as `proj"):
            ao.Optimizer({"w": np.ones(3)}, ao.SGD(lr=1, project=project), engine=engine)
    rule = ao.SGD(lr=1, project=P.ball(1.0, axis=1), stacked=True)
    with pytest.raises(ValueError, match="is of rank 1 and has no axis 1"):
        ao.Optimizer({"w": np.ones((2, 3))}, rule, engine=engine)
    opt = ao.Optimizer({"w": np.ones(3)}, ao.SGD(lr=1), engine=engine)
    with pytest.raises(ValueError, match="is of rank 1 and has no axis 4"):
        opt.groups[0].project = made[0]
    p = np.ones(3)
    own = ao.SGD(lr=1, project=lambda xp, p, h: p / xp.sum(p, axis=4, keepdims=True))
    with pytest.raises((TypeError, ValueError), match=r"axis 4( is out of bounds|$)"):
        ao.Optimizer(p, own, engine=engine).step(p.copy())
    assert p.tolist() == [1.0, 1.0, 1.0]


def test_they_are_values():
    bounds = np.zeros(2)
    same = [
        lambda: P.box(0, 1), lambda: P.box(bounds.copy(), 1), lambda: P.ball(2, axis=(0, 1)), lambda: P.nonnegative,
        lambda: P.compose(P.soft_threshold(1), P.unit_modulus), lambda: P.compose(P.box(bounds.copy())),
        lambda: P.box(bounds + 0j, 1), lambda: P.box(np.zeros(3), 1), lambda: P.support(bounds > 0),
        lambda: P.support(bounds == 0), lambda: P.compose(P.support(bounds == 0)), lambda: P.box(None, 1j),
    ]  # fmt: skip
    for i, make in enumerate(same):
        assert make() == make() == pickle.loads(pickle.dumps(make()))
        assert hash(make()) == hash(make())
        assert [make() == other() for other in same] == [i == j for j in range(len(same))]
    assert repr(P.compose(P.box(bounds), P.nonnegative)) == "compose(box(low=<ndarray (2,)>, high=None), nonnegative)"


# ---- beside everything else -----------------------------------------------------------------------------------------

SHAPE = (7, 5)
LOW = np.linspace(-0.8, 0.3, 5)
MASK = np.arange(35).reshape(SHAPE) % 3 != 0
FREE = ao.LAMB(lr=0.3)
KINDS = {
    "a box": (P.box(-0.5, 0.25), lambda p: np.clip(p, -0.5, 0.25)),
    "a box of arrays": (P.box(LOW, 0.9), lambda p: np.clip(p, LOW, 0.9)),
    "a support": (P.support(MASK), lambda p: np.where(MASK, p, 0.0)),
    "one's own": (lambda xp, p, h: p - xp.floor(p), lambda p: p - np.floor(p)),
}


def steps(opt, after=None, n=3, dtype="float64"):
    for i in range(n):
        opt.step(drawn(SHAPE, 50 + i).astype(dtype))
        if after is not None:
            opt.params[...] = after(opt.params)
    return opt


@each_engine
@pytest.mark.parametrize("kind", KINDS)
def test_fused_as_by_hand(engine, kind):
    project, by_hand = KINDS[kind]
    fused = steps(ao.Optimizer(drawn(SHAPE, 1), ao.LAMB(lr=0.3, project=project), engine=engine))
    apart = steps(ao.Optimizer(drawn(SHAPE, 1), FREE, engine=engine), by_hand)
    assert np.array_equal(fused.params, apart.params)
    assert np.array_equal(fused.state["param"]["v"], apart.state["param"]["v"])
    assert not np.array_equal(fused.params, steps(ao.Optimizer(drawn(SHAPE, 1), FREE, engine=engine)).params)


def test_the_functional_form_and_other_libraries(backend):
    rule = ao.LAMB(lr=0.3, project=P.compose(P.box(LOW, 0.9), P.ball(2.0)))
    expected = steps(ao.Optimizer(drawn(SHAPE, 1), rule, engine="array_api")).params
    opt = ao.Optimizer(backend.array(drawn(SHAPE, 1), "float64"), rule)
    params = backend.array(drawn(SHAPE, 1), "float64")
    state = rule.init(params)
    for i in range(3):
        g = backend.array(drawn(SHAPE, 50 + i), "float64")
        opt.step(g)
        params, state = ao.update(rule, params, g, state)
    np.testing.assert_allclose(backend.numpy(opt.params), expected, rtol=1e-12)
    np.testing.assert_allclose(backend.numpy(params), expected, rtol=1e-12)


def test_bytes_are_those_without():
    def passes(rule):
        return [(sorted(p.loads), sorted(p.stores)) for p in plan_for(rule, 2, "float32").passes]

    for rule in (ao.LAMB, ao.AdamW, ao.LANS, ao.CAME):
        assert passes(rule(lr=0.1)) == passes(rule(lr=0.1, project=P.compose(P.soft_threshold(0.1), P.box(-1, 1))))
    assert len(passes(ao.AdamW(project=P.ball(1.0)))) == len(passes(ao.AdamW())) + 1


def test_a_master_is_projected_and_then_rounded():
    low = 0.1  # no float16
    rule = ao.SGD(lr=1.0, project=P.box(low, None))
    opt = ao.Optimizer(np.ones(2, np.float16), rule, engine="numpy")
    opt.step(np.full(2, 3.0, np.float16))
    assert opt.state["param"]["master"].tolist() == [np.float32(low)] * 2
    assert opt.params.tolist() == [np.float16(low)] * 2


def test_it_comes_after_lookahead_and_before_the_average():
    rule = ao.SGD(lr=1.0, lookahead_steps=1, lookahead_alpha=1.0, ema_decay=0.0, project=P.box(-1, 1))
    opt = ao.Optimizer(np.zeros(1), rule, engine="numpy")
    opt.step(np.array([5.0]))
    assert [float(x[0]) for x in (opt.params, opt.averaged(), opt.state["param"]["slow"])] == [-1.0, -1.0, -5.0]


def test_a_resumed_run_equals_a_straight_one(tmp_path):
    rule = ao.LAMB(lr=0.3, project=P.compose(P.box(LOW, 0.9), P.sphere(2.0)))
    straight = steps(ao.Optimizer(drawn(SHAPE, 1), rule, engine="numpy"), n=2)
    straight.save(tmp_path / "a")
    resumed = ao.Optimizer(np.zeros(SHAPE), rule, engine="numpy")
    resumed.load(tmp_path / "a")
    for opt in (straight, resumed):
        opt.step(drawn(SHAPE, 77))
    assert np.array_equal(straight.params, resumed.params)
    for other in (P.box(LOW, 0.9), P.compose(P.box(LOW, 0.8), P.sphere(2.0)), None):
        with pytest.raises(ValueError, match=r"group 'all' had project='compose\(box"):
            ao.Optimizer(np.zeros(SHAPE), ao.LAMB(lr=0.3, project=other), engine="numpy").load(tmp_path / "a")


def test_it_can_be_changed_while_training_unless_it_has_arrays():
    opt = ao.Optimizer(np.zeros(2), ao.SGD(lr=1.0), engine="numpy")
    opt.step(np.full(2, -5.0))
    opt.project = P.box(0, 1)
    assert opt.step(np.zeros(2)).tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="group 'all': `project` cannot change while training if it has arrays"):
        opt.project = P.box(np.zeros(2), 1)
    opt.project = None
    assert opt.step(np.full(2, -5.0)).tolist() == [6.0, 6.0]


@each_fused
@pytest.mark.parametrize("first", [P.box(LOW, 0.9), P.support(MASK), P.support(MASK[0])])
def test_ranks_share_it(engine, first):
    rule = ao.LAMB(lr=0.3, project=P.compose(first, P.ball(2.0)))
    alone = steps(ao.Optimizer(drawn(SHAPE, 1), rule, engine=engine))

    def work(comm):
        opt = steps(ao.Optimizer(drawn(SHAPE, 1), rule, engine=engine, comm=comm))
        return opt.params, opt.state_dict()["tensors"]["param"]

    for params, state in ao.ranks.run(2, work):
        assert np.array_equal(params, alone.params)
        np.testing.assert_equal(state, alone.state_dict()["tensors"]["param"])


@each_compiled
@pytest.mark.parametrize("project", [P.box(LOW, 0.9), P.support(MASK)])
def test_arrays_of_a_part_are_parts(engine, project):
    rule = ao.AdamW(lr=0.3, project=project)
    alone = steps(ao.Optimizer(drawn(SHAPE, 1), rule, engine=engine)).params

    def work(comm):
        rows = slice(0, 3) if comm.rank == 0 else slice(3, 7)
        part = ao.Part(drawn(SHAPE, 1)[rows].copy(), offset=(rows.start, 0), shape=SHAPE)
        opt = ao.Optimizer(part, rule, engine=engine, comm=comm)
        for i in range(3):
            opt.step(drawn(SHAPE, 50 + i)[rows].copy())
        return opt.params.array

    assert np.array_equal(np.concatenate(ao.ranks.run(2, work)), alone)


@each_engine
@pytest.mark.parametrize("dtype", ["float32", "complex64", "float16"])
def test_groups_with_other_masks_share_a_plan(engine, dtype):
    """Each has its own mask, in layers too; and a gradient that is not finite outside of it does no harm."""
    params = {name: drawn(SHAPE, i).astype(dtype) for i, name in enumerate("abc")}
    masks = {"a": MASK, "b": ~MASK, "c": MASK[:, :1]}
    groups = {name: {"project": P.support(mask)} for name, mask in masks.items()}
    opt = ao.Optimizer(params, ao.SGD(lr=0.1, stacked=True), groups=groups, engine=engine)
    assert opt.explain().count("engine ") == 1
    for i in range(2):
        inside = {name: np.broadcast_to(mask, SHAPE) for name, mask in masks.items()}
        grads = {name: np.where(inside[name], drawn(SHAPE, 9 + i), np.nan).astype(dtype) for name in "abc"}
        before = {name: p.copy() for name, p in params.items()}
        opt.step(grads)
        for name, mask in inside.items():
            assert (params[name][~mask] == 0).all()
            moved = (before[name] - 0.1 * grads[name])[mask]
            np.testing.assert_allclose(params[name][mask], moved, rtol=1e-2 if dtype == "float16" else 1e-5)


@each_fused
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_parts_are_fused(engine, dtype):
    def run(engine, project):
        numbers = [(drawn(SHAPE, i) + 1j * drawn(SHAPE, i + 70)).astype(dtype) for i in range(4)]
        opt = ao.Optimizer(numbers[0], ao.AdamW(lr=0.3, project=project), engine=engine)
        for g in numbers[1:]:
            opt.step(g)
        return opt.params

    ends = LOW - 1j, LOW + 0.5 + 0.25j
    for project in (P.nonnegative, P.box(-0.2, 0.3), P.box(*ends), lambda xp, p, h: p * (0.5 - 1j) + 0.25j):
        fused, written = run(engine, project), run("array_api", project)
        np.testing.assert_allclose(fused, written, rtol=1e-5, atol=1e-6)
        if project.__class__ is P.box and project.arrays:
            assert ((fused.real >= ends[0].real - 1e-6) & (fused.imag <= ends[1].imag + 1e-6)).all()


# ---- problems -------------------------------------------------------------------------------------------------------


def data(rows, columns, seed):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rows, columns)), rng.standard_normal(rows)


def squares(rows=20, columns=6, seed=0):
    """½‖Ax - b‖², its gradient, and a learning rate that is sure to do."""
    a, b = data(rows, columns, seed)
    return (
        (lambda x: 0.5 * np.sum((a @ x - b) ** 2)),
        (lambda x: a.T @ (a @ x - b)),
        1.0 / np.linalg.norm(a, 2) ** 2,
        a,
        b,
    )


def by_scipy(f, gradient, start, bounds):
    return scipy.optimize.minimize(f, start, jac=gradient, bounds=bounds, options={"ftol": 1e-15, "gtol": 1e-10}).x


def nnls():
    _f, gradient, lr, a, b = squares()
    return gradient, ao.SGD(lr=lr, momentum=0.5, project=P.nonnegative), np.ones(6), scipy.optimize.nnls(a, b)[0]


def bounded_least_squares():
    _f, gradient, lr, a, b = squares(seed=1)
    expected = scipy.optimize.lsq_linear(a, b, (-0.1, 0.15), tol=1e-14).x
    return gradient, ao.SGD(lr=lr, momentum=0.5, project=P.box(-0.1, 0.15)), np.zeros(6), expected


def least_squares_with_arrays_of_bounds():
    _f, gradient, lr, a, b = squares(seed=2)
    low, high = np.linspace(-0.3, 0.05, 6), np.linspace(0.1, 0.2, 6)
    expected = scipy.optimize.lsq_linear(a, b, (low, high), tol=1e-14).x
    return gradient, ao.SGD(lr=lr, momentum=0.5, project=P.box(low, high)), np.zeros(6), expected


def bounded_rosenbrock():
    f, gradient = scipy.optimize.rosen, scipy.optimize.rosen_der
    expected = by_scipy(f, gradient, [-1.0, 0.3, 0.2], [(-2, 0.6)] * 3)
    return gradient, ao.SGD(lr=1e-3, momentum=0.9, project=P.box(-2, 0.6)), np.array([-1.0, 0.3, 0.2]), expected


def hock_schittkowski_5():
    def gradient(x):
        c, d = np.cos(x[0] + x[1]), 2 * (x[0] - x[1])
        return np.array([c + d - 1.5, c - d + 2.5])

    expected = np.array([0.5 - np.pi / 3, -0.5 - np.pi / 3])  # f = -√3/2 - π/3
    return gradient, ao.SGD(lr=0.1, project=P.box(np.array([-1.5, -3.0]), np.array([4.0, 3.0]))), np.zeros(2), expected


def logistic_regression_in_a_box():
    a, b = data(60, 4, 3)
    y = np.sign(a @ np.array([2.0, -2.0, 0.5, 0.0]) + b)

    def f(x):
        return np.sum(np.logaddexp(0, -y * (a @ x)))

    def gradient(x):
        return -a.T @ (y / (1 + np.exp(y * (a @ x))))

    expected = by_scipy(f, gradient, np.zeros(4), [(-0.5, 0.5)] * 4)
    return gradient, ao.SGD(lr=0.02, momentum=0.5, project=P.box(-0.5, 0.5)), np.zeros(4), expected


def lasso():
    f, gradient, lr, _a, _b = squares(seed=4)

    def split(x):
        return f(x[:6] - x[6:]) + 2.0 * x.sum()

    def slope(x):
        g = gradient(x[:6] - x[6:])
        return np.concatenate([g, -g]) + 2.0

    found = by_scipy(split, slope, np.full(12, 0.1), [(0, None)] * 12)
    return gradient, ao.SGD(lr=lr, project=P.soft_threshold(2.0)), np.ones(6), found[:6] - found[6:]


def nonnegative_lasso():
    f, gradient, lr, _a, _b = squares(seed=5)
    expected = by_scipy(lambda x: f(x) + 2.0 * x.sum(), lambda x: gradient(x) + 2.0, np.ones(6), [(0, None)] * 6)
    return gradient, ao.SGD(lr=lr, project=P.compose(P.soft_threshold(2.0), P.nonnegative)), np.ones(6), expected


def least_squares_in_a_ball():
    f, gradient, lr, _a, _b = squares(seed=6)
    inside = {"type": "ineq", "fun": lambda x: 0.01 - x @ x, "jac": lambda x: -2 * x}
    expected = scipy.optimize.minimize(f, np.zeros(6), jac=gradient, constraints=inside, method="SLSQP", tol=1e-14).x
    return gradient, ao.SGD(lr=lr, momentum=0.5, project=P.ball(0.1)), np.zeros(6), expected


def the_smallest_eigenvector():
    a, _ = data(12, 5, 7)
    m = a.T @ a
    v = np.linalg.eigh(m)[1][:, 0]
    start = np.ones(5) / np.sqrt(5)
    return (lambda x: m @ x), ao.SGD(lr=0.9 / np.linalg.norm(m, 2), project=P.sphere()), start, v * np.sign(v @ start)


def phases():
    rng = np.random.default_rng(8)
    x = np.exp(1j * rng.uniform(0, 6, 8))
    m = np.outer(x, x.conj())

    def gradient(p):  # of -½ p* M p, for |p| = 1; the first phase is held
        g = -m @ p
        g[0] = 0
        return g

    start = np.exp(1j * rng.uniform(0, 1, 8)) * x
    start[0] = x[0]
    return gradient, ao.SGD(lr=0.2, project=P.unit_modulus), start, x


PROBLEMS = [
    nnls, bounded_least_squares, least_squares_with_arrays_of_bounds, bounded_rosenbrock, hock_schittkowski_5,
    logistic_regression_in_a_box, lasso, nonnegative_lasso, least_squares_in_a_ball, the_smallest_eigenvector, phases,
]  # fmt: skip


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda f: f.__name__)
def test_the_optimum_is_scipys(problem):
    gradient, rule, x, expected = problem()
    opt = ao.Optimizer(x, rule, engine="array_api")
    for _ in range(3000):
        opt.step(gradient(x))
    np.testing.assert_allclose(x, expected, rtol=2e-6, atol=2e-7)

"""Why a run has ended, in words; and what is seen of trees: names, projections, dtypes."""

import numpy as np
import pytest
from scipy import optimize

import arrayopt as ao
from tests.support.slow import marked

RULES = {"LBFGS": ao.LBFGS(), "CG": ao.CG(), "SPG": ao.SPG()}
START = np.array([-1.2, 1.0])


def rosen(x):
    return optimize.rosen(x), optimize.rosen_der(x)


MATRIX, RIGHT = np.random.default_rng(0).standard_normal((2, 60)).reshape(60, 2), np.linspace(0, 1, 60)


def squares(x):
    """A sum of squares, whose gradient is never zero exactly."""
    wrong = MATRIX @ x - RIGHT
    return wrong @ wrong, 2 * MATRIX.T @ wrong


def noise(x):
    """A bowl, whose values are never the same twice."""
    return x @ x + 1e-2 * RNG.standard_normal(), 2 * x + 1e-2 * RNG.standard_normal(2)


RNG = np.random.default_rng(1)
ENDS = {
    "rounding": (squares, "below its rounding error, or the gradient is slightly wrong"),
    "the wrong sign": (lambda x: (rosen(x)[0], -rosen(x)[1]), "do not match there"),
    "a constant": (lambda x: (7.0, np.ones(2)), "do not match there"),
    "not finite nearby": (lambda x: rosen(x) if (x == START).all() else (np.nan, x), "nearby are not finite"),
    "a value at the start": (lambda x: (np.inf, x), "the value of `f` at the start is not finite"),
    "a gradient at the start": (lambda x: (1.0, np.nan * x), "the gradient at the start is not finite"),
    "steps": (rosen, "after max_steps=6 steps"),
    "no bound": (lambda x: (x.sum(), np.ones(2)), "may not be bounded below"),
    "an edge": (lambda x: (np.abs(x).max(), np.sign(x) * (np.abs(x) == np.abs(x).max())), "may not be smooth"),
    "noise": (noise, "may be noisy or rounded"),
}
ONLY_LBFGS = ("rounding", "an edge", "noise")
CASES = [(end, rule) for end in ENDS for rule in RULES if rule == "LBFGS" or end not in ONLY_LBFGS]
CASES.remove(("no bound", "SPG"))  # it follows no line


@pytest.mark.parametrize(("end", "rule"), marked(CASES, lambda end, rule: rule == "LBFGS" or end == "the wrong sign"))
def test_what_has_ended_it_is_said(end, rule):
    f, words = ENDS[end]
    most = {"steps": 6, "an edge": 10}.get(end, 500)
    found = ao.minimize(f, START, RULES[rule], tol=0, max_steps=most)
    assert found.message.startswith("not converged: ")
    assert words in found.message


def test_a_batch_is_counted_by_what_ended_its_problems():
    def f(x):
        value, g = optimize.rosen(x.T), optimize.rosen_der(x.T).T
        value[0], g[1] = np.nan, -g[1]
        return value, g

    starts = np.array([[2.0, 2.0], [-1.2, 1.0], [-1.2, 1.0], [1.0, 1.0], [1.3, 1.0]])
    found = ao.minimize(f, starts, stacked=True, max_steps=12)
    first, *others = found.message.split("; ")
    assert first == f"{found.converged.sum()} of 5 problems converged, 1 at the start"
    ends = dict(x.split(": ", 1) for x in others[:1]) | {x[3:]: x[:1] for x in others[1:]}
    assert sum(int(x[0]) for x in others) == 5 - found.converged.sum()
    assert len(ends) == len(others) == 3
    for words in ("the value of `f` at the start is not finite", "do not match there", "after max_steps=12 steps"):
        assert words in found.message


def test_convergence_at_the_start_is_said():
    found = ao.minimize(lambda x: (1e-9 * rosen(x)[0], 1e-9 * rosen(x)[1]), START)
    assert (found.steps, found.message) == (0, "converged: the gradient at the start is within `tol`")
    found = ao.minimize(rosen, START)
    assert found.message == "converged: the gradient is within `tol`"


@pytest.mark.parametrize("check_every", [1, 4])
@pytest.mark.parametrize("rule", [*RULES.values(), ao.Adam(lr=0.01)])
def test_max_steps_limits_the_steps_of_each_problem(rule, check_every):
    """And the point of the last one is looked at."""
    starts = np.array([[-1.2, 1.0], [0.5, 0.5], [1.0, 1.0]])
    seen = []

    def f(x):
        seen.append(x.copy())
        return optimize.rosen(x.T), optimize.rosen_der(x.T).T

    for most in (0, 1, 5):
        seen.clear()
        found = ao.minimize(f, starts, rule, stacked=True, max_steps=most, tol=1e-9, check_every=check_every)
        assert found.steps.tolist() == [most, most, 0]
        assert (found.evaluations > found.steps).all()
        for i in range(2):
            alone = ao.minimize(rosen, starts[i], rule, max_steps=most, tol=1e-9)
            assert (alone.steps, alone.evaluations) == (most, found.evaluations[i])
            values = [optimize.rosen(x[i]) for x in seen[: found.evaluations[i]]]
            assert found.value[i] == min(values)


def test_stranger_shapes_of_values_get_advice():
    with pytest.raises(ValueError, match="return its sum, or pass stacked=True"):
        ao.minimize(lambda x: ((x**2).sum(1), 2 * x), np.ones((5, 3)))
    with pytest.raises(ValueError, match="sum over all axes but the first"):
        ao.minimize(lambda x: (x**2, 2 * x), np.ones((5, 3)), stacked=True)


def test_a_line_without_end_is_followed_three_times():
    starts = np.array([[1.0, 2.0], [-1.2, 1.0]])

    def f(x):  # the first falls for ever
        value, g = optimize.rosen(x.T), optimize.rosen_der(x.T).T
        value[0], g[0] = -x[0].sum(), -1.0
        return value, g

    found = ao.minimize(f, starts, stacked=True)
    assert found.converged.tolist() == [False, True]
    assert found.evaluations[0] == 3 * 21
    assert "1: the value still decreases at the end of the line" in found.message


def test_a_rule_of_matrices_is_refused_in_words_of_minimize():
    with pytest.raises(ValueError, match=r"Muon: 'param', of shape .* `minimize` takes one rule for all arrays"):
        ao.minimize(rosen, START, ao.Muon(lr=0.1))
    with pytest.raises(ValueError, match=r"^minimize: group 'x': its pattern must match"):
        ao.minimize(rosen, START, project={"x": ao.projections.nonnegative})


@pytest.mark.parametrize("project", [lambda x: x, lambda: 0, lambda xp, p: p, lambda a, b, c, d: a])
def test_a_projection_of_other_arguments_is_refused(project):
    with pytest.raises(TypeError, match=r"`project` is called with .* f\(xp, p, h\); <lambda>\(.*\) does not"):
        ao.minimize(rosen, START, project=project)
    ao.minimize(rosen, START, project=lambda *args: args[1], max_steps=2)


# ---- trees ----------------------------------------------------------------------------------------------------------

GOAL = {"a": np.linspace(0.1, 1.2, 12).reshape(3, 4), "b": np.linspace(0.9, 0.2, 5)}


def distance(tree, goal=GOAL):
    """From a goal, for each problem of a batch."""
    value = sum(((tree[k] - goal[k]) ** 2).reshape(*tree["b"].shape[:-1], -1).sum(-1) for k in GOAL)
    return value, {k: 2 * (tree[k] - goal[k]) for k in GOAL}


def shares(xp, p, h):
    """A user's own, of each row: not below zero, and of sum one."""
    p = xp.where(p > 0, p, 0.0)
    return p / xp.sum(p, axis=-1, keepdims=True)


ENGINES = marked([("array_api",), ("numpy",), ("cpp",), ("numba",)], lambda engine: engine != "numba")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("project", [shares, ao.projections.ball(0.5, axis=-1)])
def test_each_array_of_a_tree_is_projected_as_it_is(project, engine):
    start = {k: np.ones_like(x) for k, x in GOAL.items()}
    found = ao.minimize(distance, start, project=project, engine=engine)
    assert found.converged
    for k, x in found.params.items():
        rows = x.sum(-1) if project is shares else np.linalg.norm(x, axis=-1)
        np.testing.assert_allclose(rows, 1.0 if project is shares else 0.5)
        if project is not shares:  # the nearest points
            nearest = 0.5 * GOAL[k] / np.linalg.norm(GOAL[k], axis=-1, keepdims=True)
            np.testing.assert_allclose(x, nearest, atol=1e-6)

    goals = {k: np.stack([x, 2 * x, 0.3 + x]) for k, x in GOAL.items()}
    many = {k: np.ones_like(x) for k, x in goals.items()}
    options = {"project": project, "engine": engine, "max_steps": 20}  # `shares` is not nearest: two do not converge
    batch = ao.minimize(lambda t: distance(t, goals), many, stacked=True, **options)
    for i in range(3):
        goal = {k: x[i] for k, x in goals.items()}
        alone = ao.minimize(lambda t, goal=goal: distance(t, goal), start, **options)
        assert alone.evaluations == batch.evaluations[i]
        for k in GOAL:
            np.testing.assert_array_equal(batch.params[k][i], alone.params[k])


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("project", [ao.projections.nonnegative, ao.projections.box(0.2, 0.8)])
def test_a_tree_under_a_projection_of_each_element_is_one_array(project, stacked):
    """The same steps, bit for bit, whether the elements are in one array or in several."""
    lead = (2,) if stacked else ()
    goal = np.random.default_rng(0).uniform(-1, 1, (*lead, 17))
    curved = np.geomspace(1, 30, 17)

    def flat(x):
        return (curved * (x - goal) ** 2).sum(-1), 2 * curved * (x - goal)

    def cut(x):
        return {"a": x[..., :12].reshape(*lead, 3, 4).copy(), "b": x[..., 12:].copy()}

    def tree(t):
        value, g = flat(np.concatenate([t["a"].reshape(*lead, 12), t["b"]], axis=-1))
        return value, cut(g)

    start = np.full((*lead, 17), 0.5)
    one = ao.minimize(flat, start, project=project, stacked=stacked)
    several = ao.minimize(tree, cut(start), project=project, stacked=stacked)
    assert np.all(several.converged)
    np.testing.assert_array_equal(several.evaluations, one.evaluations)
    for name, x in cut(one.params).items():
        np.testing.assert_array_equal(several.params[name], x)


def test_what_projects_each_element_by_itself_is_known():
    known = ao.projections
    alike = [known.nonnegative, known.unit_modulus, known.box(0, 1), known.soft_threshold(0.1)]
    others = [known.ball(1.0), known.sphere(1.0), known.box(np.zeros(3), 1), known.support(np.ones(3, bool))]
    assert all(x.elementwise for x in (*alike, known.compose(*alike)))
    assert not any(x.elementwise for x in (*others, known.compose(alike[0], others[0])))
    assert not known.compose(alike[0], shares).elementwise


def test_arrays_of_a_projection_are_those_of_each_array():
    start = {k: np.ones_like(x) for k, x in GOAL.items()}
    with pytest.raises(ValueError, match=r"SPG: an array of `project` .* of 'b'"):
        ao.minimize(distance, start, project=ao.projections.box(np.zeros((3, 4)), 1))
    found = ao.minimize(distance, start, project=ao.projections.box(np.zeros(1), np.array([0.5])))
    assert found.converged
    assert all(0.0 <= x.min() <= x.max() == 0.5 for x in found.params.values())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("stacked", [False, True])
def test_arrays_of_several_dtypes_are_one_unknown(rule, stacked):
    goal = {"a": np.arange(3.0, dtype=np.float32), "b": np.arange(4.0) + 1j}
    goal = {k: np.stack([x, 2 * x]) for k, x in goal.items()} if stacked else goal

    def f(t):
        value = sum((np.abs(t[k] - goal[k]) ** 2).sum(-1).astype(float) for k in goal)
        return value, {k: 2 * (t[k] - goal[k]) for k in goal}

    found = ao.minimize(f, {k: np.zeros_like(x) for k, x in goal.items()}, RULES[rule], tol=1e-5, stacked=stacked)
    assert np.all(found.converged)
    for k, x in goal.items():
        assert found.params[k].dtype == x.dtype
        np.testing.assert_allclose(found.params[k], x, atol=1e-5)


@pytest.mark.parametrize("rule", ["LBFGS", "CG"])
def test_a_wrong_gradient_that_agrees_by_chance_along_a_long_step_is_found(rule):
    """The first step along the last line rises by what slopes say, and the short ones do not."""
    wrong = ao.minimize(lambda x: (x[0] ** 4 + (x[0] - 1) ** 2, 8 * x**3 + 2 * (x - 1)), np.array([0.3]), RULES[rule])
    assert "do not match there" in wrong.message


def test_one_array_of_a_tree_has_bounds():
    def f(tree):
        return ((tree["a"] - 2) ** 2).sum() + (tree["b"] ** 2).sum(), {"a": 2 * (tree["a"] - 2), "b": 2 * tree["b"]}

    bounds = ao.projections.box(np.ones(3), 3)
    found = ao.minimize(f, {"a": np.zeros((2, 2)), "b": np.zeros(3)}, project={"b": bounds}, check_gradient=True)
    assert found.converged
    np.testing.assert_allclose(found.params["a"], 2.0, atol=1e-6)
    np.testing.assert_array_equal(found.params["b"], 1.0)
    with pytest.raises(ValueError, match="the names are a, b"):
        ao.minimize(f, found.params, project={"c": bounds})
    with pytest.raises(ValueError, match="both `rule` and `project` have a projection"):
        ao.minimize(f, found.params, ao.SPG(project=ao.projections.nonnegative), project={"b": bounds})


def test_the_last_evaluation_is_called_back():
    seen = []
    found = ao.minimize(lambda x: (x @ x, 2 * x), np.ones(2), callback=seen.append)
    assert [x.evaluations for x in seen] == list(range(1, found.evaluations + 1))
    assert seen[-1].converged
    assert seen[-1].message == found.message

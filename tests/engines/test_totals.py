"""Sums over all tensors: the same in each engine, on any number of ranks, and in the functional form."""

import math
from dataclasses import dataclass
from typing import final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import arrayopt as ao
from tests.support.engines import EVERY, SLOW, STAND_IN, each_engine
from tests.support.ranks import contents, differing
from tests.support.slow import PROFILE, marked, settled
from tests.support.wide import wide_numbers


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Joint(ao.Rule):
    """A step of a length over all tensors, along an average that a total of a total damps."""

    lr: ao.Hyper = ao.real("[0, inf)", 0.1)
    beta: ao.Hyper = ao.real("[0, 1)", 0.5)

    def slots(self, xp, p):
        return {"m": xp.zeros_like(p), "far": xp.sum(xp.abs(p)) * 0.0}

    def update(self, xp, p, g, s, h):
        m = h.beta * s["m"] + g
        square, largest = ao.total(h, xp.sum(m * m)), ao.total(h, xp.max(xp.abs(g)), "max")
        norm = xp.sqrt(square) + 0.1
        count = ao.total(h, 1.0)
        share = xp.sum(m * m) / norm**2
        mean = ao.total(h, share * share) / count  # a total of what a total is in
        far = s["far"] + share / (1 + mean)
        return p - h.lr * m / (norm * (1 + largest)) - 0.01 * mean * p, {"m": m, "far": far, "mean": mean}


class Witness:
    """The same in plain Python, in double precision."""

    def __init__(self, params, lr=0.1, beta=0.5):
        self.p = {name: x.astype(np.float64) for name, x in params.items()}
        self.m = {name: 0.0 * x for name, x in self.p.items()}
        self.far, self.lr, self.beta = dict.fromkeys(self.p, 0.0), lr, beta

    def step(self, grads, lr=None):
        took = {name: g for name, g in grads.items() if g is not None}
        for name, g in took.items():
            self.m[name] = self.beta * self.m[name] + g
        norm = math.sqrt(sum(float((self.m[name] ** 2).sum()) for name in took)) + 0.1
        largest = max((float(np.abs(g).max()) for g in took.values()), default=0.0)
        share = {name: float((self.m[name] ** 2).sum()) / norm**2 for name in took}
        mean = sum(x * x for x in share.values()) / max(1, len(took))
        for name in took:
            rate = (lr or {}).get(name, self.lr)
            self.far[name] += share[name] / (1 + mean)
            self.p[name] = self.p[name] - rate * self.m[name] / (norm * (1 + largest)) - 0.01 * mean * self.p[name]


SHAPES = {"w": (6, 5), "b": (7,), "wide": (3, 90, 4), "number": (1,), "long": (9000,)}
DTYPES = {"b": np.float64, "wide": np.float64}


def drawn(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(DTYPES.get(name, np.float32)) for name, shape in SHAPES.items()}


def train(engine, calls, absent=(), comm=None, groups=None, **options):
    """The optimizer after some calls, of which some lack the gradient of a tensor."""
    opt = ao.Optimizer(drawn(0), Joint(), engine=engine, comm=comm, groups=groups, stats=True, **options)
    for k in range(calls):
        grads = drawn((1, k))
        for at, name in absent:
            grads[name] = None if at == k else grads[name]
        opt.step(grads)
    return opt


def close(opt, witness):
    for name, x in witness.p.items():
        np.testing.assert_allclose(opt.params[name], x, rtol=3e-6, atol=3e-6, err_msg=name)
        assert float(opt.state[name]["far"]) == pytest.approx(witness.far[name], rel=1e-5), name


@each_engine
def test_engines_agree_with_the_witness(engine):
    absent = [(2, "w"), (3, "long")]
    witness = Witness(drawn(0))
    for k in range(5):
        witness.step({name: None if (k, name) in absent else g for name, g in drawn((1, k)).items()}, {"b": 0.3})
    close(train(engine, 5, absent=absent, groups={"b": {"lr": 0.3}}), witness)


@each_engine
def test_accumulated_gradients_meet_once(engine):
    witness = Witness(drawn(0))
    for k in (0, 2):
        one, other = drawn((1, k)), drawn((1, k + 1))
        witness.step({name: (one[name] + other[name]) / 2 for name in one})
    close(train(engine, 4, accumulate=2), witness)


@each_engine
def test_a_skipped_step_changes_nothing(engine):
    opt = train(engine, 2, skip_nonfinite=True)
    before = contents(opt)
    grads = drawn(5)
    grads["b"][0] = np.nan
    opt.step(grads)
    assert set(differing(before, contents(opt))) == {"step", "extra"}


@pytest.mark.parametrize(
    ("engine", "ranks"),
    marked([(e, n) for e in EVERY for n in (2, 3, 4)], lambda e, n: n == 3 and e not in SLOW),
)
def test_ranks_give_the_same_bits(engine, ranks):
    absent = [(1, "long")]
    assert not differ(engine, ranks, 3, absent)


def differ(engine, ranks, *args, **options):
    """What differs on ranks from one process."""
    one = train(engine, *args, **options)
    expected, stats = contents(one), one.stats.read()

    def rank(comm):
        opt = train(engine, *args, **options, comm=comm)
        return differing(expected, contents(opt)) + ["stats"] * (opt.stats.read() != stats)

    return [name for found in ao.ranks.run(ranks, rank) for name in found]


@settled(8)
@given(
    engine=st.sampled_from([e for e in EVERY if e not in SLOW or PROFILE != "quick"]),
    ranks=st.integers(1, 4),
    absent=st.lists(st.tuples(st.integers(0, 3), st.sampled_from(sorted(SHAPES))), max_size=6),
    accumulate=st.sampled_from([1, 2]),
)
def test_any_of_it_together(engine, ranks, absent, accumulate):
    if accumulate > 1:  # a mean is of all calls, or of none
        absent = [(k // 2 * 2 + i, name) for k, name in absent for i in (0, 1)]
    witness = Witness(drawn(0))
    for k in range(0, 4, accumulate):
        every = [drawn((1, k + i)) for i in range(accumulate)]
        means = {name: np.mean([g[name] for g in every], axis=0, dtype=np.float64) for name in SHAPES}
        witness.step({name: None if (k, name) in absent else g for name, g in means.items()})
    close(train(engine, 4, absent, accumulate=accumulate), witness)
    assert not differ(engine, ranks, 4, absent, accumulate=accumulate)


@each_engine
def test_layers_meet_layers(engine):
    """Layer i of each stacked tensor is with layer i of others of as many layers."""
    rng = np.random.default_rng(0)
    params = {"a": rng.standard_normal((3, 5)), "b": rng.standard_normal((3, 2, 4)), "c": rng.standard_normal((2, 4))}
    grads = [{name: rng.standard_normal(x.shape) for name, x in params.items()} for _ in range(3)]
    expected = {name: x.copy() for name, x in params.items()}
    for names, count in ((("a", "b"), 3), (("c",), 2)):
        for i in range(count):
            witness = Witness({name: params[name][i] for name in names})
            for g in grads:
                witness.step({name: g[name][i] for name in names})
            for name in names:
                expected[name][i] = witness.p[name]
    opt = ao.Optimizer(params, Joint(stacked=True), engine=engine)
    for g in grads:
        opt.step(g)
    for name, x in expected.items():
        np.testing.assert_allclose(opt.params[name], x, rtol=1e-9, err_msg=name)


@each_engine
def test_blocks_are_tensors(engine):
    rng = np.random.default_rng(0)
    whole, other = rng.standard_normal((6, 4)), rng.standard_normal(5)
    grads = [(rng.standard_normal((6, 4)), rng.standard_normal(5)) for _ in range(3)]
    witness = Witness({"0": whole[:2], "1": whole[2:4], "2": whole[4:], "b": other})
    rule = Joint()
    opt = ao.Optimizer({"w": whole, "b": other}, rule, engine=engine, groups={"w": {"blocks": 3}})
    for g, h in grads:
        witness.step({"0": g[:2], "1": g[2:4], "2": g[4:], "b": h})
        opt.step({"w": g, "b": h})
    made = np.concatenate([witness.p[name] for name in "012"])
    np.testing.assert_allclose(opt.params["w"], made, rtol=1e-9)


@pytest.mark.parametrize("jit", [False, True])
def test_the_functional_form(jit):
    jax = pytest.importorskip("jax")
    with wide_numbers():
        params = {name: jax.numpy.asarray(x) for name, x in drawn(0).items()}
        rule, witness = Joint(), Witness(drawn(0))
        step = jax.jit(rule_step) if jit else rule_step
        state = rule.init(params)
        for k in range(3):
            grads = {name: jax.numpy.asarray(g) for name, g in drawn((1, k)).items()}
            params, state = step(params, grads, state)
            witness.step(drawn((1, k)))
        for name, x in witness.p.items():
            np.testing.assert_allclose(params[name], x, rtol=2e-6, atol=2e-6, err_msg=name)


def rule_step(params, grads, state):
    return ao.update(Joint(), params, grads, state)


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Odd(ao.Rule):
    """It asks for a total of matrices alone."""

    def slots(self, xp, p):
        return {}

    def update(self, xp, p, g, s, h):
        return p - (ao.total(h, xp.sum(g)) if p.ndim == 2 else 1.0), {}


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Hidden(ao.Rule):
    """It cannot be traced."""

    def slots(self, xp, p):
        return {}

    def update(self, xp, p, g, s, h):
        first = ao.total(h, float(np.asarray(g).sum()))
        return p - ao.total(h, first * 2.0), {}


@each_engine
def test_tensors_that_ask_for_other_totals(engine):
    opt = ao.Optimizer({"w": np.ones((2, 2)), "b": np.ones(2)}, Odd(), engine=engine)
    with pytest.raises(ValueError, match=r"Odd: the update of each tensor must call `total` equally often.* 0 and 1"):
        opt.step({"w": np.ones((2, 2)), "b": np.ones(2)})
    assert opt.params["w"].sum() == 4


def test_a_rule_that_cannot_be_traced():
    params = {"a": np.zeros(2), "b": np.zeros(3)}
    opt = ao.Optimizer(params, Hidden(), engine="array_api")
    opt.step({"a": np.ones(2), "b": np.ones(3)})
    assert params["a"].tolist() == [-20.0, -20.0]  # 2 + 3, twice, of two tensors


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Multiplied(ao.Rule):
    """A product of matrices, damped by a total and by a total of a total."""

    lr: ao.Hyper = ao.real("[0, inf)", 0.1)

    def slots(self, xp, p):
        return {}

    def update(self, xp, p, g, s, h):
        square = ao.total(h, xp.sum(g * g))
        largest = ao.total(h, xp.sum(xp.abs(p)) * square, "max")
        u = xp.matmul(xp.matmul(g, xp.matrix_transpose(g)), g) if g.ndim == 2 else g
        return p - h.lr * u / (1.0 + square + largest), {}


@pytest.mark.filterwarnings("ignore::arrayopt.NotFusedWarning")
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_products_beside_totals_run_as_they_are_written(ranks):
    rng = np.random.default_rng(0)
    shapes = {"a": (4, 3), "b": (5, 2), "c": (3,)}
    start, grads = ({name: rng.standard_normal(shape) for name, shape in shapes.items()} for _ in range(2))
    square = sum((g * g).sum() for g in grads.values())
    largest = max(np.abs(p).sum() for p in start.values()) * square

    def run(comm):
        params = {name: p.copy() for name, p in start.items()}
        return ao.Optimizer(params, Multiplied(), comm=comm).step(grads)

    for found in ao.ranks.run(ranks, run):
        for name, g in grads.items():
            u = g @ g.T @ g if g.ndim == 2 else g
            np.testing.assert_allclose(found[name], start[name] - 0.1 * u / (1 + square + largest), rtol=1e-12)
    with pytest.raises(ValueError, match="products of matrices and totals in one rule are not fused"):
        ao.Optimizer(start, Multiplied(), engine="numpy")


def test_the_word_says_what_is_wrong():
    class Wrong:
        pass

    with pytest.raises(TypeError, match="the first argument must be the `h` of a rule's update"):
        ao.total(Wrong(), 1.0)


@pytest.mark.parametrize(
    ("x", "how", "match"),
    [
        (lambda g: g, "sum", "`x` must be one number"),
        (lambda g: "1", "sum", "`x` must be a real number"),
        (lambda g: 1.0, "mean", "`how` must be 'sum' or 'max'"),
    ],
)
def test_numbers_that_are_none(x, how, match):
    @final
    @dataclass(frozen=True, kw_only=True, repr=False)
    class Bad(ao.Rule):
        def slots(self, xp, p):
            return {}

        def update(self, xp, p, g, s, h):
            return p - ao.total(h, x(g), how), {}

    opt = ao.Optimizer(np.ones(3), Bad(), engine="array_api")
    with pytest.raises((TypeError, ValueError), match=match):
        opt.step(np.ones(3))
    assert opt.params.tolist() == [1.0, 1.0, 1.0]


def test_totals_of_a_moment_are_one_exchange():
    text = ao.Optimizer(np.ones(3, np.float32), Joint(), engine=STAND_IN).explain()
    assert text.count("pass ") == 2


@pytest.mark.parametrize("engine", ["numba", "cpp"])
def test_the_source_has_each_phase(engine):
    text = ao.source(ao.Prodigy(), engine=engine)
    assert text.count("bytes per float32 parameter") == 2


def test_tensors_are_not_given_one_by_one():
    opt = ao.Optimizer({"a": np.ones(2), "b": np.ones(2)}, Joint())
    with pytest.raises(ValueError, match="with totals, a step needs all gradients at once"):
        opt.give("a", np.ones(2))


def test_at_the_door_of_torch():
    torch, door = pytest.importorskip("torch"), pytest.importorskip("arrayopt.torch")
    params = {name: x.astype(np.float64) for name, x in drawn(0).items()}
    tensors = [torch.nn.Parameter(torch.tensor(x)) for x in params.values()]
    theirs, mine = door.Prodigy(tensors, d0=1e-3), ao.Optimizer(params, ao.Prodigy(d0=1e-3))
    for k in range(3):
        grads = {name: g.astype(np.float64) for name, g in drawn((1, k)).items()}
        for x, g in zip(tensors, grads.values(), strict=True):
            x.grad = torch.tensor(g)
        theirs.step()
        mine.step(grads)
    for x, y in zip(tensors, mine.params.values(), strict=True):
        np.testing.assert_array_equal(x.detach().numpy(), y)


@pytest.mark.parametrize("engine", ["array_api", "numpy", "cpp"])
def test_a_total_is_a_statistic_and_a_slot(engine):
    """As it is, with nothing computed from it; of a number, too, whose slots have an element as it has."""

    @dataclass(frozen=True, kw_only=True)
    class Told(ao.Rule):
        def slots(self, xp, p):
            return {name: xp.sum(xp.zeros_like(p)) for name in ("last", "again")}

        def update(self, xp, p, g, s, h):
            total = ao.total(h, xp.sum(g))
            new = {"last": total, "again": ao.total(h, s["last"] * total)}
            return p - g, {**new, "total": total, "most": ao.total(h, xp.max(g), "max"), "before": s["last"]}

    grads = {"a": np.ones(3), "b": np.full((), 8.0, np.float32)}
    opt = ao.Optimizer({"a": np.ones(3), "b": np.ones((), np.float32)}, Told(), engine=engine, stats=True)
    for _ in range(2):
        opt.step(grads)
    for name in "ab":
        assert (opt.state[name]["last"], opt.state[name]["again"]) == (11.0, 242.0)
        assert [opt.stats.read()[name][key] for key in ("total", "most", "before")] == [11.0, 8.0, 11.0]

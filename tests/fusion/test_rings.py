"""Passes over rings are rolled up: loops over members, whose code does not grow with their number."""

import re
from dataclasses import dataclass
from typing import final

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.fusion.plans import plan_for
from arrayopt.fusion.ring_members import families
from arrayopt.fusion.rings import rolled
from tests.rules.test_rings import arrays, check, trained
from tests.support.ringed import ringed
from tests.support.slow import marked


def loops_of(rule, engine="cpp"):
    """The loops over elements in the source of a rule, without the numbers of values."""
    text = ao.source(rule, rank=1, engine=engine)
    return [re.sub(r"\d+", "", loop) for loop in re.findall(STARTS[engine], text, re.S)]


STARTS = {
    "cpp": r"static __forceinline__ void pass_.*?\n}",
    "numba": r"def pass_.*?\n    return",
    "cupy": r"void turns\d+\(.*?\n}",
}


@pytest.mark.parametrize(
    ("engine", "kind"),
    marked(
        [(e, kind) for e in STARTS for kind in ("ring", "LBFGS", "search")],
        lambda e, kind: (e, kind) in (("cpp", "ring"), ("numba", "LBFGS"), ("cupy", "ring")),
    ),
)
def test_code_does_not_grow_with_members(engine, kind):
    def rule(k):
        if kind == "ring":
            return ringed(k)()
        return ao.LBFGS(memory=k, line_search="strong_wolfe" if kind == "search" else None)

    assert loops_of(rule(12), engine) == loops_of(rule(20), engine) != []
    assert len("".join(loops_of(rule(12), engine))) < 1.5 * len("".join(loops_of(rule(7), engine)))


@pytest.mark.parametrize(
    ("engine", "k", "dtype"),
    marked(
        [(e, k, d) for e in ("cpp", "numba") for k in (8, 9, 11, 12) for d in ("float32", "float64", "bfloat16")],
        lambda e, k, d: (e, k, d) in (("cpp", 9, "float32"), ("cpp", 8, "float64")),
    ),
)
def test_rolled_loops_have_what_the_witness_has(engine, k, dtype):
    check(trained(engine, k, dtype), k, dtype)


def test_ranks_and_threads_change_no_bit(monkeypatch):
    shapes = {"long": (30_011,), "short": (5,)}
    alone = trained("cpp", 9, shapes=shapes).params

    def run(comm=None):
        return {name: np.array(x) for name, x in trained("cpp", 9, comm=comm, shapes=shapes).params.items()}

    monkeypatch.setenv("ARRAYOPT_NUM_THREADS", "1")
    for found in (run(), *ao.ranks.run(2, run), *ao.ranks.run(3, run)):
        for name, x in alone.items():
            assert found[name].tobytes() == x.tobytes()


K = 9


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Pairs(ao.Rule):
    """Products of a ring with itself; members that are moved from one ring to another; a sum within a sum."""

    rings = ("a", "b")
    wide = ("n",)
    lr: ao.Hyper = ao.real("[0, inf)", 0.1)

    def slots(self, xp, p):
        return {"a": ao.ring(xp, p, K), "b": ao.ring(xp, p, K), "n": xp.sum(0.0 * p)}

    def update(self, xp, p, g, s, h):
        a = ao.put(s["a"], s["n"], g + 0.1 * p)
        products = ao.dots(a, a)
        weights = [1.0 / (1.0 + sum(xp.abs(x) for x in row)) for row in products]
        mixed = ao.combined(a, weights)
        twice = mixed + ao.combined(s["b"], [0.1 * w for w in weights])
        b = ao.put(s["b"], h.t - 1.0, twice * xp.abs(p))
        n = xp.where(s["n"] >= K - 1.0, 0.0, s["n"] + 1.0)
        return p - h.lr * twice, {"a": a, "b": b, "n": n}


@pytest.mark.parametrize("engine", ["numpy", "cpp", pytest.param("numba", marks=pytest.mark.slow)])
def test_a_ring_with_itself(engine):
    opts = [ao.Optimizer(arrays("float64", 0), Pairs(), engine=e) for e in ("array_api", engine)]
    for t in range(12):
        for opt in opts:
            opt.step(arrays("float64", t + 1))
    one, other = opts
    for name in one.params:
        np.testing.assert_allclose(other.params[name], one.params[name], rtol=1e-11, atol=1e-13)
        for slot in ("a", "b"):
            np.testing.assert_allclose(other.state[name][slot], one.state[name][slot], rtol=1e-11, atol=1e-13)


def test_its_products_are_loops_over_pairs():
    plan = plan_for(Pairs(), 1, "float32")
    found = [rolled(x, [*plan.slots], 8) for x in plan.passes]
    assert [part.over for one in found if one for part in one.parts].count("triangle") == 1
    assert all(found)


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Odd(ao.Rule):
    """One member is treated in another way."""

    rings = ("a",)
    lr: ao.Hyper = ao.real("[0, inf)", 0.1)

    def slots(self, xp, p):
        return {"a": ao.ring(xp, p, K)}

    def update(self, xp, p, g, s, h):
        sums = ao.dots(s["a"], g)
        sums[3] = xp.sum(s["a"][3] * g * g)
        a = ao.put(s["a"], xp.sum(0.0 * g) + 3.0, g)
        return p - h.lr * (g + ao.combined(s["a"], [x / (1.0 + xp.abs(x)) for x in sums])), {"a": a}


def test_rings_of_numbers_are_rings_of_tensors_without_axes():
    """Beside them are values of the step, which are stored, too."""
    assert "void units_" in ao.source(ao.LBFGS(memory=9, line_search=None), rank=0, engine="cpp")


def test_what_differs_is_not_rolled_up():
    plan = plan_for(Odd(), 1, "float32")
    assert not rolled(plan.passes[0], [*plan.slots], 8)
    opts = [ao.Optimizer(arrays("float64", 0), Odd(), engine=e) for e in ("array_api", "cpp")]
    for t in range(3):
        for opt in opts:
            opt.step(arrays("float64", t + 1))
    for name in opts[0].params:
        np.testing.assert_allclose(opts[1].params[name], opts[0].params[name], rtol=1e-12)


def test_names_of_rings():
    assert families(f"m_{j}" for j in reversed(range(8))) == {"m": [f"m_{j}" for j in range(8)]}
    assert families(["m_0", "m_01", *(f"v_{j}" for j in range(1, 10))]) == {}
    assert families((f"m_{j}" for j in range(7)), 8) == {}

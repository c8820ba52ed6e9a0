"""Bits of an element or a column depend neither on how many lie beside it nor on the engine."""

import dataclasses

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.fusion.plans import plan_for
from tests.support.cases import RUN_IDS, RUNS, make
from tests.support.engine_runs import problem, run
from tests.support.engines import COMPILED, SLOW, STAND_IN, each_compiled
from tests.support.slow import marked

LENGTH = 70
WHOLE = f"0 to {LENGTH}"
STRETCHES = {
    f"{i} to {j}": (i, j) for i, j in [(0, n) for n in range(1, LENGTH + 1)] + [(i, LENGTH) for i in range(1, 34)]
}
"""All lengths up to several vectors, with every remainder; and ends, in which elements lie elsewhere in vectors."""

KINDS = {
    "float32": {}, "float64": {}, "complex64": {},
    "bfloat16": {"master_weights": "split"}, "float32, 8 bits": {"state_dtype": "int8"},
}  # fmt: skip


def kinds(name):
    """The dtypes that a rule takes."""
    return [kind for kind in KINDS if getattr(ao, name).complex_ok or not kind.startswith("complex")]


QUICK = {RUN_IDS.index(f"{name}-{i}") for name, i in (("AdamW", 9), ("CAME", 0))}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Columns(ao.Rule):
    """A sum over columns of a product that is also stored, and so is rounded there."""

    def slots(self, xp, p):
        return {"m": xp.zeros_like(p)}

    def update(self, xp, p, g, s, h):
        m = p * g
        return 0.0 * p + xp.sum(m, axis=-2, keepdims=True), {"m": m}


@each_compiled
def test_a_column_has_the_same_bits_in_a_vector_and_after_the_last(engine):
    p, g = np.random.default_rng(0).standard_normal((2, 50, 64)).astype("float32")
    widths = {f"w{n}": n for n in (15, 17, 40, 64)}
    opt = ao.Optimizer({name: p[:, :n].copy() for name, n in widths.items()}, Columns(), engine=engine)
    opt.step({name: g[:, :n].copy() for name, n in widths.items()})
    for name, n in widths.items():
        assert opt.params[name].tobytes() == opt.params["w64"][:, :n].tobytes(), name


@pytest.mark.parametrize(
    ("engine", "row", "kind"),
    marked(
        ((engine, row, kind) for engine in COMPILED for row in range(len(RUNS)) for kind in kinds(RUNS[row][0])),
        lambda engine, row, kind: engine not in SLOW and kind == "float32" and row in QUICK,
        lambda x: RUN_IDS[x] if isinstance(x, int) else x,
    ),
)
def test_an_element_has_the_same_bits_in_every_position_and_engine(engine, row, kind):
    """In a rule without sums over a tensor, the elements of one; else one that is not zero, so that sums are exact."""
    name, options = RUNS[row]
    rule, dtype = make(name, options | KINDS[kind]), kind.partition(",")[0]
    _, values = problem((("x", (LENGTH,)),), dtype, 4)
    alone = has_sums(rule, dtype)
    placed = {f"{k} at {i}": (k, i) for k in range(8) for i in range(LENGTH)} if alone else STRETCHES

    def tensors(x):
        return {name: only(x, *place) if alone else x[slice(*place)].copy() for name, place in placed.items()}

    p, *grads = (tensors(x["x"]) for x in values)
    params = run(engine, rule, p, grads)[0].params
    for name, (first, last) in placed.items():
        whole = params[f"{first} at 0"][:1] if alone else params[WHOLE][first:last]
        assert np.isfinite(whole.astype(complex)).all()
        assert (params[name][last : last + 1] if alone else params[name]).tobytes() == whole.tobytes(), name
    if engine != STAND_IN and not dtype.startswith("complex"):
        others = run(STAND_IN, rule, p, grads)[0].params
        assert [x.tobytes() for x in params.values()] == [x.tobytes() for x in others.values()]


def has_sums(rule, dtype):
    """Whether an element's update depends on the other elements of a tensor: by a sum, or by the scale of a block."""
    plan = plan_for(rule, 1, dtype)
    return bool(plan.quantized) or any(p.sums for p in plan.passes)


def only(x, number, position):
    """Zeros but for one of the numbers, at a position."""
    made = np.zeros_like(x)
    made[position] = x[number]
    return made

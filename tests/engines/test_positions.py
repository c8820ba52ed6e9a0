"""Bits of an element or a column depend neither on how many lie beside it nor on the engine."""

import dataclasses

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.fusion.plans import plan_for
from tests.support.cases import RUN_IDS, RUNS, make
from tests.support.engine_runs import problem, run, same, shapes_of
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


SUMMED = ("scalar", "prime", "matrix", "several chunks", "several tiles of rows")
"""Shapes over which engines add up elements in units, rows and columns."""

QUICK = {RUN_IDS.index(f"{name}-{i}") for name, i in (("AdamW", 9), ("CAME", 0))}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Columns(ao.Rule):
    """A sum over columns of a product that is also stored, and so is rounded there."""

    def slots(self, xp, p):
        return {"m": xp.zeros_like(p)}

    def update(self, xp, p, g, s, h):
        m = p * g
        return 0.0 * p + xp.sum(m, axis=-2, keepdims=True), {"m": m}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Total(ao.Rule):
    """The sum of a gradient."""

    def slots(self, xp, p):
        return {}

    def update(self, xp, p, g, s, h):
        return 0.0 * p + xp.sum(g), {}


def total(x, chunk=8192):
    """The sum as an engine adds it up: lanes of 64 bytes, of which halves are added; units in double precision."""
    made, lanes = 0.0, 64 // x.itemsize
    for first in range(0, x.size, chunk):
        part = x[first : first + chunk]
        part = np.append(part, np.zeros(-part.size % lanes, x.dtype)).reshape(-1, lanes)
        part = np.add.accumulate(part)[-1]
        while part.size > 1:
            part = part[: part.size // 2] + part[part.size // 2 :]
        made += float(part[0])
    return x.dtype.type(made)


@each_compiled
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_sum_has_one_order(engine, dtype):
    rng = np.random.default_rng(0)
    grads = {f"g{n}": rng.standard_normal(n).astype(dtype) for n in (1, 7, 16, 43, 8191, 20011)}
    opt = ao.Optimizer({name: np.zeros_like(g) for name, g in grads.items()}, Total(), engine=engine)
    opt.step(grads)
    assert {name: p[0] for name, p in opt.params.items()} == {name: total(g) for name, g in grads.items()}


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
        for given in ((p, grads), problem(shapes_of(SUMMED), dtype)):
            same(run(engine, rule, *given)[1], run(STAND_IN, rule, *given)[1])


def has_sums(rule, dtype):
    """Whether an element's update depends on the other elements of a tensor: by a sum, or by the scale of a block."""
    plan = plan_for(rule, 1, dtype)
    return bool(plan.quantized) or any(p.sums for p in plan.passes)


def only(x, number, position):
    """Zeros but for one of the numbers, at a position."""
    made = np.zeros_like(x)
    made[position] = x[number]
    return made

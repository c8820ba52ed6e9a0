"""Planning: rows, columns, the first axis and the tensor; and what cannot be fused."""

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.fusion.dims import TraceError
from arrayopt.fusion.layout import layout
from arrayopt.fusion.plans import plan_for
from tests.support.engines import COMPILED, FUSED, SLOW, each_compiled, each_fused
from tests.support.planning import SEVERAL_TILES, agree, zeros
from tests.support.slow import marked
from tests.support.tracing import made

# ---- rows, columns, the first axis, and the tensor ------------------------------------------------------------------


def by_rows(xp, p, g, s, h):
    r = 0.9 * s["r"] + xp.sum(g * g, axis=-1)
    return p - h.lr * g / xp.sqrt(1.0 + xp.expand_dims(r, axis=-1)), {"r": r}


def by_columns(xp, p, g, s, h):
    c = 0.9 * s["c"] + xp.mean(g * g, axis=-2)
    return p - h.lr * g / xp.sqrt(1.0 + xp.expand_dims(c, axis=-2)), {"c": c}


def by_first_axis(xp, p, g, s, h):
    over = tuple(range(1, p.ndim))
    return p - h.lr * (g - xp.mean(g, axis=over, keepdims=True)) / (1.0 + xp.sum(p * p, axis=over, keepdims=True)), {}


def by_rows_of_rows(xp, p, g, s, h):
    r = xp.sum(g * g, axis=-1)
    share = r / xp.mean(r, axis=-1, keepdims=True) + xp.sum(r)
    return p - h.lr * g / (1.0 + xp.expand_dims(share, axis=-1)), {}


def by_rows_and_their_sum(xp, p, g, s, h):
    r = xp.sum(g * g, axis=-1)
    return p - h.lr * g / ((1.0 + xp.expand_dims(r, axis=-1)) + xp.sum(r)), {}


def by_mask_of_rows(xp, p, g, s, h):
    keep = xp.expand_dims(xp.sum(g, axis=-1) > 0, axis=-1)
    return xp.where(keep, p - h.lr * g, p) - h.lr * xp.astype(keep, p.dtype), {}


def rows_after_columns(xp, p, g, s, h):
    u = g / (1.0 + xp.sum(g * g, axis=-2, keepdims=True))
    u = u / (1.0 + xp.sum(u * u, axis=-1, keepdims=True))
    return p - h.lr * u / (1.0 + xp.sum(u * u)), {}


def kept_dimension(xp, p, g, s, h):
    r = s["r"] + xp.mean(g * g, axis=-1, keepdims=True)
    return p - h.lr * g / (1.0 + r), {"r": r}


EXTENTS = {
    "rows": (by_rows, zeros(rows=["r"])),
    "columns": (by_columns, zeros(columns=["c"])),
    "the first axis": (by_first_axis, zeros()),
    "rows of rows": (by_rows_of_rows, zeros()),
    "rows and their sum": (by_rows_and_their_sum, zeros()),
    "a mask of rows": (by_mask_of_rows, zeros()),
    "rows after columns": (rows_after_columns, zeros()),
    "a dimension of length one": (
        kept_dimension,
        lambda xp, p: {"r": xp.zeros_like(xp.sum(p, axis=-1, keepdims=True))},
    ),
}


@pytest.mark.parametrize(("update", "slots"), EXTENTS.values(), ids=EXTENTS)
def test_values_over_fewer_axes(update, slots):
    agree(made(update, slots)(), SEVERAL_TILES, "numpy", steps=2, relative=1e-5)


# each rank is compiled anew: matrices of several tiles, and one other rank
FEW = ("rows after columns", "rows", "columns", "the first axis", "a mask of rows")


@pytest.mark.parametrize(
    ("engine", "name"),
    marked(
        [(engine, name) for engine in COMPILED for name in FEW],
        lambda engine, name: engine not in SLOW and name == "rows after columns",
    ),
)
def test_values_over_fewer_axes_that_are_compiled(engine, name):
    agree(made(*EXTENTS[name])(), SEVERAL_TILES[:3], engine, steps=2, relative=1e-5)


FIRST = [(((2, 3, 5), (700, 5, 11)),), (((5, 4, 3, 3), (3, 2, 210, 190), (2, 3, 2, 2, 4)),)]


@each_compiled
@pytest.mark.parametrize("shapes", marked(FIRST, lambda shapes: len(shapes) == 2, lambda x: f"rank {len(x[0])}"))
def test_values_over_the_first_axis_that_are_compiled(engine, shapes):
    agree(made(by_first_axis)(), shapes, engine, steps=2, relative=1e-5)


@each_compiled
def test_values_of_rows_before_and_after_a_sum_over_them(engine):
    agree(made(by_rows_and_their_sum)(), ((3, 4),), engine)


def small_slots_handed_over(xp, p, g, s, h):
    r = s["r"] + xp.mean(g * g, axis=-1)
    return p - h.lr * g * xp.expand_dims(s["old"], axis=-1), {"r": r, "old": s["r"]}


@each_fused
def test_slots_over_rows_may_be_handed_over(engine):
    agree(made(small_slots_handed_over, zeros(rows=["r", "old"]))(), ((3, 4),), engine)


def slot_of_a_tensor(xp, p, g, s, h):
    d = s["d"] + xp.sum(g * g)
    return p - h.lr * g / (1.0 + s["d"]), {"d": d}


@each_fused
def test_a_slot_may_be_one_value_per_tensor(engine):
    agree(made(slot_of_a_tensor, zeros(tensors=["d"]))(), ((3, 4), (5,), (), (20011,)), engine)


def matrices_only(xp, p, g, s, h):
    return p - h.lr * (g + (0.5 * p if p.ndim >= 2 else 0.0)), {}


@each_fused
def test_a_rule_may_treat_matrices_otherwise(engine):
    agree(made(matrices_only)(), ((3, 4), (5,), (2, 3, 4)), engine)


@pytest.mark.parametrize("rank", [0, 5])
def test_a_rule_sees_the_rank_of_a_tensor(rank):
    rule = made(lambda xp, p, g, s, h: (p - h.lr * float(p.ndim) * g, {}))()
    agree(rule, ((1,) * rank,), "numpy")


@pytest.mark.parametrize("axis", [2, -3])
def test_an_axis_in_the_middle_of_a_tensor_of_rank_5_is_refused_or_right(axis):
    def update(xp, p, g, s, h):
        return p - h.lr * g, {"s": s["s"] + xp.sum(g * g, axis=axis)}

    rule = made(update, lambda xp, p: {"s": xp.zeros_like(xp.sum(p, axis=axis))})()
    try:
        ao.Optimizer(np.ones((2, 3, 5, 3, 2)), rule, engine="numpy")
    except ValueError as error:
        assert "array_api" in str(error)  # noqa: PT017 - refusing is as good as doing it right
        return
    agree(rule, ((2, 3, 5, 3, 2),), "numpy")


FLAT = {
    "the size": lambda xp, p, g: p - 0.1 * g / xp.sum(xp.zeros_like(p) + 1.0),
    "the length of a row": lambda xp, p, g: p - 0.1 * g / xp.sum(xp.zeros_like(p) + 1.0, axis=-1, keepdims=True),
    "the length of a column": lambda xp, p, g: p - 0.1 * g / xp.sum(xp.zeros_like(p) + 1.0, axis=-2, keepdims=True),
    "a sum of a sum": lambda xp, p, g: p - 0.1 * g * xp.sum(xp.sum(g, keepdims=True)),
    "a mean of a mean": lambda xp, p, g: p - 0.1 * g * xp.mean(xp.mean(g, keepdims=True), axis=-1, keepdims=True),
    "a sum of a sum over an axis": lambda xp, p, g: p - 0.1 * g * xp.sum(xp.sum(g, keepdims=True), axis=0),
    "a sum over each axis": lambda xp, p, g: p - 0.1 * g * xp.sum(xp.sum(g, axis=-1, keepdims=True)),
}


@pytest.mark.parametrize("name", FLAT)
def test_values_that_do_not_vary_are_summed_over_the_axes_that_are_there(name):
    rule = made(lambda xp, p, g, s, h: (FLAT[name](xp, p, g), {}))()
    agree(rule, ((3, 4), (2, 3, 4)), "numpy", relative=1e-5)


def mask_of_masks(xp, p, g, s, h):
    return p - h.lr * xp.where(xp.where(g > 0, p > 0, p < 1), g, p), {}


@each_fused
def test_a_mask_may_be_chosen_from_masks(engine):
    agree(made(mask_of_masks)(), ((3, 4), (20011,)), engine)


# ---- what cannot be fused -------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::arrayopt.NotFusedWarning")
@pytest.mark.parametrize(
    ("axis", "rank", "left"),
    [
        (0, 3, "RC of ARC"),
        (0, 4, "BRC of ABRC"),
        (1, 4, "ARC of ABRC"),
        ((0, 1), 3, "C of ARC"),
        ((1, 2), 4, "AC of ABRC"),
    ],
)
def test_a_sum_that_cannot_be_fused_says_so(axis, rank, left):
    rule = made(lambda xp, p, g, s, h: (p - h.lr * g / xp.sum(g * g, axis=axis, keepdims=True), {}))()
    with pytest.raises(TraceError, match=f"a reduction that keeps the axes {left} is not fused"):
        layout(plan_for(rule, rank, "float32"))
    for engine in FUSED:
        with pytest.raises(
            ValueError, match=f"engine '{engine}' cannot run Made: a reduction that keeps the axes {left}"
        ):
            ao.Optimizer(np.ones((2,) * rank), rule, engine=engine)
    agree(rule, ((2,) * rank,), "array_api")
    agree(rule, ((2,) * rank,), "auto")


@pytest.mark.filterwarnings("ignore::arrayopt.NotFusedWarning")
@pytest.mark.parametrize(("axis", "left"), [(0, "BRC"), (1, "ARC")])
def test_what_rows_and_columns_of_a_sum_make_together_says_so(axis, left):
    """It goes over rows and columns, but is no element."""

    def update(xp, p, g, s, h):
        rows, columns = (xp.sqrt(xp.sum(g * g, axis=over, keepdims=True)) for over in (-1, -2))
        return p - h.lr * xp.sum(rows, axis=axis, keepdims=True) * xp.sum(columns, axis=axis, keepdims=True), {}

    rule = made(update)()
    for engine in FUSED:
        with pytest.raises(ValueError, match=f"cannot run Made: a value over {left} of ABRC is not fused"):
            ao.Optimizer(np.ones((2, 3, 4, 5)), rule, engine=engine)
    agree(rule, ((2, 3, 4, 5),), "auto")


def complex_slot_of_rows(xp, p, g, s, h):
    r = s["r"] + xp.sum(g, axis=-1)
    return p - h.lr * xp.expand_dims(r, axis=-1), {"r": r}


@pytest.mark.filterwarnings("ignore::arrayopt.NotFusedWarning")
@pytest.mark.parametrize(
    ("update", "slots", "op"),
    [
        (complex_slot_of_rows, zeros(rows=["r"]), "complex"),
        (lambda xp, p, g, s, h: (p - g * xp.sqrt(xp.sum(g, axis=-1, keepdims=True)), {}), zeros(), "sqrt"),
    ],
)
def test_what_is_not_fused_of_complex_values_of_rows_says_so(update, slots, op):
    rule = made(update, slots, complex_ok=True)()
    for engine in FUSED:
        with pytest.raises(ValueError, match=f"`{op}` of complex values per row, column or tensor is not fused"):
            ao.Optimizer(np.ones((2, 3), "complex64"), rule, engine=engine)
    agree(rule, ((2, 3),), "auto", "complex64")

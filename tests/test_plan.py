"""Planning: how many bytes each rule moves, and that passes in that order compute what the rule says."""

import ml_dtypes
import numpy as np
import pytest

import arrayopt as ao
from arrayopt.fusion.layout import geometry, layout
from arrayopt.fusion.plan import plan_for
from arrayopt.fusion.trace import TraceError
from tests.cases import ALL, IDS, make
from tests.test_trace import made

RANKS = (1, 2, 3, 4)

# bytes per float32 parameter: of rank < 2, and of higher ranks
BYTES = {
    "LAMB-0": (40, 40),
    "LAMB-1": (40, 40),
    "LAMB-2": (40, 40),
    "LAMB-3": (40, 40),
    "LAMB-4": (28, 32),  # without the ratio; centralization reads the gradient of a matrix once more
    "LAMB-5": (64, 64),  # two more slots; norms of the units of p and g; the gradient once more
    "LANS-0": (48, 48),
    "LANS-1": (64, 64),  # one part after the other: a norm of what the first part leaves
    "LANS-2": (48, 48),
    "LANS-3": (32, 36),
    "LANS-4": (48, 48),
    "CAME-0": (36, 32),
    "CAME-1": (36, 32),
    "CAME-2": (40, 36),  # reads the parameter once more for its scale
    "CAME-3": (28, 28),  # no threshold, no norm of u
    "CAME-4": (40, 40),
    "CAME-5": (48, 44),
    "LARS-0": (28, 28),
    "LARS-1": (28, 28),
    "LARS-2": (28, 28),
    "LARS-3": (20, 24),
    "AdamW-0": (28, 28),
    "AdamW-1": (28, 28),
    "AdamW-2": (36, 36),  # a third slot
    "AdamW-3": (36, 40),
    "Adam-0": (28, 28),
    "Adam-1": (36, 36),
    "Adam-2": (28, 28),
    "SGD-0": (12, 12),  # no slot
    "SGD-1": (20, 20),
    "SGD-2": (20, 20),
    "SGD-3": (12, 16),
    "SGD-4": (24, 24),
    "Adafactor-0": (32, 24),
    "Adafactor-1": (28, 20),
    "Adafactor-2": (36, 28),
    "Adafactor-3": (32, 28),
}
every_row = pytest.mark.parametrize("row", range(len(ALL)), ids=IDS)


OF_STRUCTURE = {make(*ALL[IDS.index(name)]).structure: pinned for name, pinned in BYTES.items()}


@every_row
def test_bytes_per_parameter(row):
    """A row with other numbers and nothing else has the bytes of its kind; one of a new kind needs its line above."""
    rule = make(*ALL[row])
    vector, matrix = OF_STRUCTURE[rule.structure]
    assert [plan_for(rule, rank, "float32").bytes_per_parameter() for rank in RANKS] == [vector, *[matrix] * 3]
    assert plan_for(rule, 1, "float64").bytes_per_parameter() == 2 * vector


@every_row
def test_reports_and_clipping_cost_no_bytes(row):
    rule = make(*ALL[row])
    for rank in RANKS:
        plain, more = (plan_for(rule, rank, "float32", clip=x, stats=x) for x in (False, True))
        assert more.bytes_per_parameter() == plain.bytes_per_parameter()
        assert [list(p.loads) for p in more.passes] == [list(p.loads) for p in plain.passes]


PLANS = {
    "AdamW": (
        ao.AdamW(),
        1,
        """\
pass 0: load p g m v; store p m v; reduce -; 28 B
28 bytes per float32 parameter""",
    ),
    "SGD with momentum": (
        ao.SGD(lr=0.1, momentum=0.9),
        2,
        """\
pass 0: load p g buf; store p buf; reduce -; 20 B
20 bytes per float32 parameter""",
    ),
    "LAMB": (
        ao.LAMB(),
        2,
        """\
pass 0: load p g m v; store m v; reduce per tensor, per tensor; 24 B
pass 1: load p m v; store p; reduce -; 16 B
40 bytes per float32 parameter""",
    ),
    "LANS": (
        ao.LANS(),
        2,
        """\
pass 0: load g; store -; reduce per tensor; 4 B
pass 1: load p g m v; store m v; reduce per tensor, per tensor, per tensor; 24 B
pass 2: load p g m v; store p; reduce -; 20 B
48 bytes per float32 parameter""",
    ),
    "LARS": (
        ao.LARS(lr=0.1),
        2,
        """\
pass 0: load p g; store -; reduce per tensor, per tensor; 8 B
pass 1: load p g buf; store p buf; reduce -; 20 B
28 bytes per float32 parameter""",
    ),
    "CAME": (
        ao.CAME(lr=0.1),
        3,
        """\
pass 0: load g; store -; reduce per row, per column; 4 B
pass 1: load g; store -; reduce per tensor; 4 B
pass 2: load g m; store m; reduce per row, per column; 12 B
pass 3: load p m; store p; reduce -; 12 B
32 bytes per float32 parameter""",
    ),
    "SGD, centralized": (
        ao.SGD(lr=0.1, grad_centralization=True),
        4,
        """\
pass 0: load g; store -; reduce per batch; 4 B
pass 1: load p g; store p; reduce -; 12 B
16 bytes per float32 parameter""",
    ),
}


@pytest.mark.parametrize(("rule", "rank", "text"), PLANS.values(), ids=PLANS)
def test_a_plan_can_be_read(rule, rank, text):
    assert str(plan_for(rule, rank, "float32")) == text


# ---- every plan is sound --------------------------------------------------------------------------------------------


def check(plan):
    """Follow a plan with a list of what is known, and of what each array holds."""
    held = dict.fromkeys(("p", "g", *plan.slots, *plan.spilled), "old")
    known, stored, written = set(), {}, []

    def ready(n):
        return n in known or n.op == "const" or (n.on_host and n in plan.scalars) or small(n)

    def small(n):
        return n.op == "input" and n.axes != plan.element and n.data in plan.small

    for k, part in enumerate(plan.prologues):
        for n in part:
            assert n.axes != plan.element
            assert all(ready(a) for a in n.args), n
            known.add(n)
        if k == len(plan.passes):
            break
        p = plan.passes[k]
        here = set()
        for name, n in p.loads.items():
            assert n == stored[name] if held[name] == "new" else (n.op, n.data) == ("input", name)
            here.add(n)
        for n in p.nodes:
            assert all(a in here or ready(a) for a in n.args), n
            here.add(n)
        for s in p.sums:
            assert s.args[0] in here or ready(s.args[0])
            known.add(s)
        for name, n in p.stores.items():
            assert n in here or ready(n)
            held[name], stored[name] = "new", n
            written.append(name)
        assert p.stores or p.sums, "a pass without a purpose"
    assert len(written) == len(set(written))  # what stays as it was is not written
    assert {*written, *plan.small} >= {*plan.touched} - {name for p in plan.passes for name in p.loads}
    assert all(ready(n) for n in [*plan.small.values(), *plan.reports.values()])


@every_row
@pytest.mark.parametrize("more", [False, True], ids=["plain", "clipped, with reports"])
def test_each_value_is_there_when_it_is_needed(row, more):
    for rank in RANKS:
        check(plan_for(make(*ALL[row]), rank, "float32", clip=more, stats=more))


@every_row
def test_shape_matters_only_to_rows_columns_and_centralization(row):
    rule = make(*ALL[row])
    merged = not (rule.grad_centralization or rule.clip_unit_ratio or ALL[row][0] in ("CAME", "Adafactor"))
    plans = [plan_for(rule, rank, "float32") for rank in RANKS]
    assert [plan.element for plan in plans] == (["C"] * 4 if merged else ["C", "RC", "ARC", "ABRC"])
    assert len(set(plans)) == (1 if merged else 4)


def test_a_sum_is_made_in_the_pass_that_reads_its_terms_anyway():
    """LANS: ‖p‖ could be had in pass 0, which reads g alone; it is summed in pass 1, which reads p for u."""
    first, second, third = plan_for(ao.LANS(), 1, "float32").passes
    assert (list(first.loads), len(first.sums), len(second.sums), third.sums) == (["g"], 1, 3, ())
    p = second.loads["p"]
    assert [s.args[0].args for s in second.sums].count((p, p)) == 1


def test_a_sum_is_not_put_off_past_what_needs_it():
    first, second = plan_for(ao.LARS(lr=0.1), 1, "float32").passes
    assert (len(first.sums), len(second.sums)) == (2, 0)


def test_a_report_is_summed_where_its_terms_are():
    plan = plan_for(ao.LANS(), 1, "float32", stats=True)
    assert [len(p.sums) for p in plan.passes] == [1, 3, 1]  # the last: of the update
    assert layout(plan).tensor.keys() >= {n for n in plan.reports.values() if not n.on_host}


# ---- made-up rules against the rule as it is written ----------------------------------------------------------------


def zeros(*names, rows=(), columns=(), tensors=()):
    """Slots of each kind."""

    def slots(xp, p):
        each = {name: xp.zeros_like(p) for name in names}
        each |= {name: xp.zeros_like(xp.sum(p, axis=-1)) for name in rows}
        each |= {name: xp.zeros_like(xp.sum(p, axis=-2)) for name in columns}
        return each | {name: xp.zeros_like(xp.sum(p)) for name in tensors}

    return slots


def fused_and_written(rule, shapes, engine, dtype="float32", steps=3):
    """Parameters and slots after some steps: of an engine, and of the functional form, which writes nothing."""
    rng = np.random.default_rng(0)

    def drawn(shape):
        x = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if "complex" in dtype else 0)
        return np.asarray(x).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)

    params = {str(i): drawn(shape) for i, shape in enumerate(shapes)}
    grads = [{name: drawn(p.shape) for name, p in params.items()} for _ in range(steps)]
    opt = ao.Optimizer({name: p.copy() for name, p in params.items()}, rule, engine=engine)
    state = rule.init(params)
    for g in grads:
        opt.step(g)
        params, state = ao.update(rule, params, g, state)
    found = {f"{name}.{k}": x for name in params for k, x in {"p": opt.params[name], **opt.state[name]}.items()}
    exact = {f"{name}.{k}": x for name in params for k, x in {"p": params[name], **state["tensors"][name]}.items()}
    return found, exact


def agree(rule, shapes, engine, dtype="float32", steps=3, relative=2e-6):
    found, exact = fused_and_written(rule, shapes, engine, dtype, steps)
    assert list(found) == list(exact)
    for name, x in exact.items():
        wide = [np.asarray(v, dtype=np.complex128 if dtype.startswith("complex") else float) for v in (found[name], x)]
        assert wide[0].shape == wide[1].shape, name
        np.testing.assert_allclose(
            *wide, rtol=10 * relative, atol=relative * max(1.0, abs(wide[1]).max()), err_msg=name
        )


def hand_over(xp, p, g, s, h):
    return p - h.lr * s["a"], {"a": s["b"] + g, "b": s["a"]}


def remember(xp, p, g, s, h):
    return p - h.lr * (g + p - s["before"]), {"before": p}


def exchange(xp, p, g, s, h):
    return s["m"], {"m": p}


def old_slot_later(xp, p, g, s, h):
    m = 0.9 * s["m"] + g
    return p - h.lr * xp.sqrt(xp.mean(m * m)) * s["m"], {"m": m}


def two_old_slots_later(xp, p, g, s, h):
    a, b = s["a"] + g, s["b"] - g * s["a"]
    size = xp.sqrt(xp.mean(a * a) + xp.mean(b * b))
    return p - h.lr * (s["a"] + size * s["b"]), {"a": a, "b": b}


def new_parameter_later(xp, p, g, s, h):
    new = p - h.lr * g
    return new, {"m": new * xp.sqrt(xp.mean(new * new))}


def three_norms_deep(xp, p, g, s, h):
    m = s["m"] + g / (1.0 + xp.sqrt(xp.sum(g * g)))
    m = m / (1.0 + xp.sqrt(xp.sum(m * m)))
    return p - h.lr * m / (1.0 + xp.sqrt(xp.sum((m + p) ** 2))), {"m": m}


def same_for_all(xp, p, g, s, h):
    return xp.zeros_like(p) + xp.mean(g), {"m": xp.zeros_like(p) + 2.0}


HAZARDS = {
    "slots that are handed over": (hand_over, zeros("a", "b")),
    "the parameter in a slot": (remember, zeros("before")),
    "parameter and slot exchanged": (exchange, zeros("m")),
    "an old slot in a later pass": (old_slot_later, zeros("m")),
    "two old slots in a later pass": (two_old_slots_later, zeros("a", "b")),
    "the new parameter in a later pass": (new_parameter_later, zeros("m")),
    "norms of norms": (three_norms_deep, zeros("m")),
    "one value for all": (same_for_all, zeros("m")),
}
SHAPES = ((7,), (3, 4), (20011,), ())


@pytest.mark.parametrize("engine", ["numpy", "numba"])
@pytest.mark.parametrize(("update", "slots"), HAZARDS.values(), ids=HAZARDS)
def test_what_is_overwritten_is_not_needed_any_more(update, slots, engine):
    rule = made(update, slots)()
    plan = plan_for(rule, 1, "float32")
    check(plan)
    agree(rule, SHAPES, engine)


def test_a_slot_is_stored_in_the_last_pass_that_needs_its_old_value():
    late, early = (plan_for(made(f, zeros("m"))(), 1, "float32") for f in (old_slot_later, new_parameter_later))
    assert [list(p.stores) for p in late.passes] == [[], ["p", "m"]]
    assert [list(p.stores) for p in early.passes] == [["p"], ["m"]]
    assert list(early.passes[1].loads) == ["p"]  # the new one, read back


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("engine", ["numpy", "numba"])
def test_a_value_that_a_later_pass_needs_is_not_rounded_in_between(dtype, engine):
    found, exact = fused_and_written(made(new_parameter_later, zeros("m"))(), ((300,),), engine, dtype, steps=1)
    np.testing.assert_allclose(found["0.m"], exact["0.m"], rtol=2e-5)


def part_of_the_old(xp, p, g, s, h):
    size = xp.real(p)
    return p - h.lr * size * g, {"m": size * g}


@pytest.mark.parametrize("engine", ["numpy", "numba"])
def test_a_part_of_a_complex_value_outlives_the_value(engine):
    agree(made(part_of_the_old, zeros("m"), complex_ok=True)(), ((3, 4), (20011,)), engine, "complex64", relative=1e-5)


def projected(xp, p, g, s, h):
    """Complex values per tensor: without the part that lies along p."""
    along = xp.sum(xp.conj(p) * g) / xp.sum(xp.real(p) ** 2 + xp.imag(p) ** 2)
    return p - h.lr * (g - along * p), {}


def complex_values_of_rows(xp, p, g, s, h):
    row, column = xp.mean(g, axis=-1, keepdims=True), xp.sum(p, axis=-2, keepdims=True)
    size = abs(row) + xp.sqrt(xp.real(row) ** 2 + xp.imag(row) ** 2) + 1.0
    turned = -xp.conj(row) * (row - 2.0) / size + xp.where(xp.real(row) > 0, row, 1.0)
    return p - h.lr * (g * turned + row * column) + xp.mean(xp.sum(p, axis=-1)), {}


@pytest.mark.parametrize("engine", ["numpy", "numba"])
@pytest.mark.parametrize(
    ("update", "shapes"),
    [(projected, ((3, 4), (20011,), (7,), ())), (complex_values_of_rows, ((3, 4), (300, 257)))],
    ids=["of a tensor", "of rows and columns"],
)
def test_complex_values_over_fewer_axes(update, shapes, engine):
    rule = made(update, complex_ok=True)()
    check(plan_for(rule, 2, "complex64"))
    agree(rule, shapes, engine, "complex64", steps=2, relative=1e-5)


@pytest.mark.parametrize("engine", ["numpy", "numba"])
def test_complex_gradients_are_centralized(engine):
    agree(ao.LAMB(grad_centralization=True), (*SEVERAL_TILES[:2], (7,)), engine, "complex64", relative=1e-5)
    if engine == "numpy":
        agree(ao.AdamW(grad_centralization=True), SEVERAL_TILES, engine, "complex64", relative=1e-5)


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
SEVERAL_TILES = (
    (3, 4),
    (300, 257),
    (9, 9000),
    (2, 3, 5),
    (700, 5, 11),
    (5, 4, 3, 3),
    (3, 2, 210, 190),
    (2, 3, 2, 2, 4),
)


@pytest.mark.parametrize(("update", "slots"), EXTENTS.values(), ids=EXTENTS)
def test_values_over_fewer_axes(update, slots):
    agree(made(update, slots)(), SEVERAL_TILES, "numpy", steps=2, relative=1e-5)


# each rank takes a module to compile: matrices of several tiles, and one other rank
@pytest.mark.parametrize("name", ["rows", "columns", "the first axis", "a mask of rows", "rows after columns"])
def test_values_over_fewer_axes_with_numba(name):
    agree(made(*EXTENTS[name])(), SEVERAL_TILES[:3], "numba", steps=2, relative=1e-5)


@pytest.mark.parametrize("shapes", [((2, 3, 5), (700, 5, 11)), ((5, 4, 3, 3), (3, 2, 210, 190), (2, 3, 2, 2, 4))])
def test_values_over_the_first_axis_with_numba(shapes):
    agree(made(by_first_axis)(), shapes, "numba", steps=2, relative=1e-5)


def test_values_of_rows_before_and_after_a_sum_over_them_with_numba():
    agree(made(by_rows_and_their_sum)(), ((3, 4),), "numba")


def small_slots_handed_over(xp, p, g, s, h):
    r = s["r"] + xp.mean(g * g, axis=-1)
    return p - h.lr * g * xp.expand_dims(s["old"], axis=-1), {"r": r, "old": s["r"]}


@pytest.mark.parametrize("engine", ["numpy", "numba"])
def test_slots_over_rows_may_be_handed_over(engine):
    agree(made(small_slots_handed_over, zeros(rows=["r", "old"]))(), ((3, 4),), engine)


def slot_of_a_tensor(xp, p, g, s, h):
    d = s["d"] + xp.sum(g * g)
    return p - h.lr * g / (1.0 + s["d"]), {"d": d}


@pytest.mark.parametrize("engine", ["numpy", "numba"])
def test_a_slot_may_be_one_value_per_tensor(engine):
    agree(made(slot_of_a_tensor, zeros(tensors=["d"]))(), ((3, 4), (5,), (), (20011,)), engine)


def matrices_only(xp, p, g, s, h):
    return p - h.lr * (g + (0.5 * p if p.ndim >= 2 else 0.0)), {}


@pytest.mark.parametrize("engine", ["numpy", "numba"])
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


@pytest.mark.parametrize("engine", ["numpy", "numba"])
def test_a_mask_may_be_chosen_from_masks(engine):
    agree(made(mask_of_masks)(), ((3, 4), (20011,)), engine)


# ---- what cannot be fused -------------------------------------------------------------------------------------------


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
    with pytest.raises(TraceError, match=f"a sum that leaves the axes {left} is not fused"):
        layout(plan_for(rule, rank, "float32"))
    for engine in ("numpy", "numba"):
        with pytest.raises(ValueError, match=f"engine '{engine}' cannot run Made: a sum that leaves the axes {left}"):
            ao.Optimizer(np.ones((2,) * rank), rule, engine=engine)
    agree(rule, ((2,) * rank,), "array_api")
    agree(rule, ((2,) * rank,), "auto")


def complex_slot_of_rows(xp, p, g, s, h):
    r = s["r"] + xp.sum(g, axis=-1)
    return p - h.lr * xp.expand_dims(r, axis=-1), {"r": r}


@pytest.mark.parametrize(
    ("update", "slots", "op"),
    [
        (complex_slot_of_rows, zeros(rows=["r"]), "complex"),
        (lambda xp, p, g, s, h: (p - g * xp.sqrt(xp.sum(g, axis=-1, keepdims=True)), {}), zeros(), "sqrt"),
    ],
)
def test_what_is_not_fused_of_complex_values_of_rows_says_so(update, slots, op):
    rule = made(update, slots, complex_ok=True)()
    for engine in ("numpy", "numba"):
        with pytest.raises(ValueError, match=f"`{op}` of complex values per row, column or tensor is not fused"):
            ao.Optimizer(np.ones((2, 3), "complex64"), rule, engine=engine)
    agree(rule, ((2, 3),), "auto", "complex64")


# ---- units ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("element", ["C", "RC", "ARC", "ABRC"])
def test_units_cover_each_element_once(element):
    shapes = [
        x for x in [*SEVERAL_TILES, (7,), (20011,), (1, 1), (1, 70000), (70000, 1), (3, 1, 1)] if len(x) >= len(element)
    ]
    shapes = [x for x in shapes if element == "C" or min(len(x), 4) == len(element)]
    for shape, row in zip(shapes, geometry(shapes, element).tolist(), strict=True):
        size, a, b, r, c, tr, tc, g, nr, nc, units = row
        assert a * b * r * c == size == np.prod(shape)
        seen = np.zeros((a * b, r, c), int)
        for unit in range(units):
            ct, rt, ab = unit % nc, unit // nc % nr, unit // nc // nr * g
            block = seen[ab : ab + g, rt * tr : (rt + 1) * tr, ct * tc : (ct + 1) * tc]
            assert 0 < block.size <= 1 << 19
            block += 1
        assert (seen == 1).all()

"""Planning: how many bytes each rule moves, and that passes in that order compute what the rule says."""

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.fusion import plans as planning
from arrayopt.fusion.layout import geometry, layout
from arrayopt.fusion.plans import plan_for
from tests.support.cases import ALL, IDS, QUICK_ROWS, make
from tests.support.engines import COMPILED, FUSED, SLOW, each_fused
from tests.support.planning import SEVERAL_TILES, agree, check, fused_and_written, zeros
from tests.support.slow import marked
from tests.support.tracing import made

RANKS = (1, 2, 3, 4)

# bytes per float32 parameter: of rank < 2, and of higher ranks
BYTES = {
    "LAMB-0": (40, 40),
    "LAMB-1": (40, 40),
    "LAMB-2": (40, 40),
    "LAMB-3": (40, 40),
    "LAMB-4": (28, 32),  # without the ratio; centralization reads the gradient of a matrix once more
    "LAMB-5": (64, 64),  # two more slots; norms of the units of p and g; the gradient once more
    "LAMB-6": (40, 40),
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
    "LARS-4": (28, 28),
    "LARS-5": (28, 28),
    "AdamW-0": (28, 28),
    "AdamW-1": (28, 28),
    "AdamW-2": (36, 36),  # a third slot
    "AdamW-3": (36, 40),
    "AdamW-5": (28, 28),
    "AdamW-6": (28, 28),
    "Adam-0": (28, 28),
    "Adam-1": (36, 36),
    "Adam-2": (28, 28),
    "Adam-3": (28, 28),
    "SGD-0": (12, 12),  # no slot
    "SGD-1": (20, 20),
    "SGD-2": (20, 20),
    "SGD-3": (12, 16),
    "SGD-4": (24, 24),
    "Adafactor-0": (32, 24),
    "Adafactor-1": (28, 20),
    "Adafactor-2": (36, 28),
    "Adafactor-3": (32, 28),
    "Lion-0": (20, 20),
    "Lion-2": (20, 20),
    "RMSprop-0": (20, 20),
    "RMSprop-1": (36, 36),
    "RMSprop-2": (28, 28),
    "RMSprop-3": (20, 20),
    "NAdam-0": (28, 28),  # a slot of one number costs nothing
    "NAdam-1": (28, 28),
    "RAdam-0": (28, 28),
    "RAdam-1": (28, 28),
    "RAdam-2": (28, 28),
    "Adan-0": (44, 44),
    "Adan-1": (44, 44),
    "Adan-2": (44, 48),
    "AdEMAMix-0": (36, 36),
    "AdEMAMix-1": (36, 36),
    "AdEMAMix-2": (36, 36),
    "ScheduleFreeAdamW-0": (28, 28),
    "AdamH-0": (40, 40),  # LAMB's
    "AdamH-1": (40, 40),
    "AdamH-2": (40, 40),
    "LAMB-7": (44, 44),  # the share of elements is known before the norm of what is left of them
    "LARS-6": (40, 40),
    "AdamW-7": (36, 36),
    "AdamW-8": (44, 44),
    "AdamW-9": (52, 52),
    "Adafactor-4": (40, 40),
    "Lion-3": (28, 28),
    "Lion-4": (36, 36),
    "NAdam-3": (36, 36),
    "Adan-3": (52, 52),
    "AdaBelief-0": (28, 28),
    "AdaBelief-1": (28, 28),
    "AdaBelief-2": (28, 28),
    "Sophia-0": (24, 24),  # what it does not change is not written
    "Sophia-1": (24, 24),
    "Sophia-2": (28, 28),
    "FISTA-0": (32, 32),
    "FISTA-1": (20, 24),
    "FISTA-2": (32, 32),
}
every_row = pytest.mark.parametrize("row", QUICK_ROWS)


OF_STRUCTURE = {make(*ALL[IDS.index(name)]).structure: pinned for name, pinned in BYTES.items()}


@every_row
def test_bytes_per_parameter(row):
    """A row with other numbers and nothing else has the bytes of its kind; one of a new kind needs its line above."""
    rule = make(*ALL[row])
    vector, matrix = OF_STRUCTURE[rule.structure]
    assert [plan_for(rule, rank, "float32").bytes_per_parameter() for rank in RANKS] == [vector, *[matrix] * 3]
    assert plan_for(rule, 1, "float64").bytes_per_parameter() == 2 * vector


@every_row
def test_clipping_costs_no_bytes(row):
    rule = make(*ALL[row])
    for rank in RANKS:
        plain, more = (plan_for(rule, rank, "float32", clip=x) for x in (False, True))
        assert more.bytes_per_parameter() == plain.bytes_per_parameter()
        assert [list(p.loads) for p in more.passes] == [list(p.loads) for p in plain.passes]


@every_row
def test_reports_are_a_plan_of_their_own_which_writes_nothing(row):
    """It moves no more bytes than the update, though it has no scratch memory and may read slots again."""
    rule = make(*ALL[row])
    for rank in RANKS:
        for dtype in ("float32", "bfloat16"):
            update, watching = (plan_for(rule, rank, dtype, stats=x) for x in (False, True))
            assert watching.reports.keys() >= {"param_norm", "grad_norm", "update_norm"}
            assert (watching.written, watching.spilled, update.reports) == ((), {}, {})
            assert not any(p.stores for p in watching.passes)
            assert watching.bytes_per_parameter() <= update.bytes_per_parameter()


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
pass 0: load p g m v; store m v; reduce per tensor; 24 B
pass 1: load p m v; store p; reduce -; 16 B
40 bytes per float32 parameter""",
    ),
    "LANS": (
        ao.LANS(),
        2,
        """\
pass 0: load g; store -; reduce per tensor; 4 B
pass 1: load p g m v; store m v; reduce per tensor; 24 B
pass 2: load p g m v; store p; reduce -; 20 B
48 bytes per float32 parameter""",
    ),
    "AdamH": (
        ao.AdamH(),
        2,
        """\
pass 0: load p g m v; store m v; reduce per tensor; 24 B
pass 1: load p m v; store p; reduce -; 16 B
40 bytes per float32 parameter""",
    ),
    "LARS": (
        ao.LARS(lr=0.1),
        2,
        """\
pass 0: load p g; store -; reduce per tensor; 8 B
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


@every_row
@pytest.mark.parametrize("more", [False, True], ids=["plain", "clipped, with reports"])
def test_each_value_is_there_when_it_is_needed(row, more):
    for rank in RANKS:
        check(plan_for(make(*ALL[row]), rank, "float32", clip=more, stats=more))


@every_row
def test_shape_matters_only_to_rows_columns_and_centralization(row):
    rule = make(*ALL[row])
    factored = ALL[row][0] == "CAME" or (ALL[row][0] == "Adafactor" and rule.factored)
    merged = not (rule.grad_centralization or rule.clip_unit_ratio or factored)
    first = plan_for(rule, 1, "float32")
    planning._planned.cache_clear()
    plans = [plan_for(rule, rank, "float32") for rank in RANKS]
    assert plans[0] is first  # what somebody has is not made anew
    assert [plan.element for plan in plans] == (["C"] * 4 if merged else ["C", "RC", "ARC", "ABRC"])
    assert len(set(plans)) == (1 if merged else 4)


def test_a_sum_is_made_in_the_pass_that_reads_its_terms_anyway():
    """LANS: ‖p‖ could be had in pass 0, which reads g alone; it is summed in pass 1, which reads p for u."""
    first, second, third = plan_for(ao.LANS(), 1, "float32").passes
    counts = [len(p.reductions) for p in (first, second, third)]
    assert (list(first.loads), counts) == (["g"], [3, 9, 0])  # a norm is three sums
    lean = plan_for(ao.LANS(), 1, "float32", lean=True).passes
    assert [len(p.reductions) for p in lean] == [2, 6, 0]
    p = second.loads["p"]
    assert (p, p) in [s.args[0].args for s in second.reductions]


def test_a_sum_is_not_put_off_past_what_needs_it():
    first, second = plan_for(ao.LARS(lr=0.1), 1, "float32").passes
    assert (len(first.reductions), len(second.reductions)) == (6, 0)


def test_a_report_is_summed_where_its_terms_are():
    plan = plan_for(ao.LANS(), 1, "float32", stats=True)
    assert [len(p.reductions) for p in plan.passes] == [3, 9, 3]  # the last: of the update
    assert layout(plan).tensor.keys() >= {n for n in plan.reports.values() if not n.on_host}


# ---- made-up rules against the rule as it is written ----------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("engine", "name"),
    marked(
        ((engine, name) for engine in FUSED for name in HAZARDS),
        lambda engine, name: engine not in COMPILED or (engine not in SLOW and name == "two old slots in a later pass"),
    ),
)
def test_what_is_overwritten_is_not_needed_any_more(engine, name):
    rule = made(*HAZARDS[name])()
    plan = plan_for(rule, 1, "float32")
    check(plan)
    agree(rule, SHAPES, engine)


def test_a_slot_is_stored_in_the_last_pass_that_needs_its_old_value():
    late, early = (plan_for(made(f, zeros("m"))(), 1, "float32") for f in (old_slot_later, new_parameter_later))
    assert [list(p.stores) for p in late.passes] == [[], ["p", "m"]]
    assert [list(p.stores) for p in early.passes] == [["p"], ["m"]]
    assert list(early.passes[1].loads) == ["p"]  # the new one, read back


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@each_fused
def test_a_value_that_a_later_pass_needs_is_not_rounded_in_between(dtype, engine):
    found, exact = fused_and_written(made(new_parameter_later, zeros("m"))(), ((300,),), engine, dtype, steps=1)
    np.testing.assert_allclose(found["0.m"], exact["0.m"], rtol=2e-5)


def part_of_the_old(xp, p, g, s, h):
    size = xp.real(p)
    return p - h.lr * size * g, {"m": size * g}


@each_fused
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


COMPLEX_VALUES = {
    "of a tensor": (projected, ((3, 4), (20011,), (7,), ())),
    "of rows and columns": (complex_values_of_rows, ((3, 4), (300, 257))),
}


@pytest.mark.parametrize(
    ("engine", "name"),
    marked(
        ((engine, name) for engine in FUSED for name in COMPLEX_VALUES),
        lambda engine, name: engine not in COMPILED or (engine not in SLOW and name == "of a tensor"),
    ),
)
def test_complex_values_over_fewer_axes(name, engine):
    update, shapes = COMPLEX_VALUES[name]
    rule = made(update, complex_ok=True)()
    check(plan_for(rule, 2, "complex64"))
    agree(rule, shapes, engine, "complex64", steps=2, relative=1e-5)


@each_fused
def test_complex_gradients_are_centralized(engine):
    agree(ao.LAMB(grad_centralization=True), (*SEVERAL_TILES[:2], (7,)), engine, "complex64", relative=1e-5)
    if engine == "numpy":
        agree(ao.AdamW(grad_centralization=True), SEVERAL_TILES, engine, "complex64", relative=1e-5)


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


def test_copies_have_names_of_their_own_in_all_phases():
    """Slots that change places are copied, and so is what a total takes as it is: in phases of one plan."""

    def update(xp, p, g, s, h):
        totals = [ao.total(h, s[name]) for name in "abcdefij"]
        return p - g / sum(totals), {a: s[b] for a, b in zip("abcdefij", "badcfeji", strict=True)}

    rule = made(update, lambda xp, p: {name: xp.sum(p) for name in "abcdefij"})()
    phases = plan_for(rule, rank=1, dtype="float32").phases
    copies = {node for phase in phases for node in phase.between_nodes if node.op == "copy"}
    assert len(copies) == len({node.id for node in copies}) == 16

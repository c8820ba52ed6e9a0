"""Small matrices side by side: which passes follow each other, and what the engines make of them."""

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.engines.registry import ENGINES
from arrayopt.fusion import segments as module
from arrayopt.fusion.dims import TraceError
from arrayopt.fusion.plans import plan_for
from arrayopt.fusion.segments import in_segments, segment_geometry, suits
from tests.support.aliases import ALIASES
from tests.support.engine_runs import agree, contents, problem, run, same
from tests.support.engines import COMPILED, FUSED, SLOW, each_fused
from tests.support.slow import marked
from tests.support.tracing import made


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """A single matrix is enough, so that each test's are few; NumPy processes these in several groups."""
    monkeypatch.setattr(module, "MANY_MATRICES", 1)
    monkeypatch.setattr("arrayopt.engines.numpy.engine.GROUP_SIZE", 2000)
    monkeypatch.setattr("arrayopt.engines.numpy.stacks.GROUP_SIZE", 2000)


KERNELS = (
    ("3 x 3", (37, 5, 3, 3)),
    ("1 x 1", (300, 31, 1, 1)),
    ("7 x 7", (13, 3, 7, 7)),
    ("16 x 16", (3, 70, 16, 16)),
    ("rows", (5, 41, 9, 1)),
    ("columns", (205, 1, 1, 9)),
    ("rank 3", (2111, 2, 3)),
    ("rank 5", (3, 2, 11, 3, 2)),
    ("one matrix", (1, 1, 3, 3)),
    ("none", (0, 4, 3, 3)),
)


RANK_FOUR = tuple((name, shape) for name, shape in KERNELS if len(shape) == 4)  # each rank is compiled anew
FULL = tuple((name, shape) for name, shape in RANK_FOUR if 0 not in shape)  # what is empty takes another


def split(rule, rank=4):
    return in_segments(plan_for(rule, rank, "float32"))


def test_only_sums_over_whole_tensors_end_a_segment():
    came = split(ao.CAME(lr=0.1)).segments
    assert [s.passes for s in came] == [(0, 1), (2, 3)]
    assert [sorted(s.writes) for s in came] == [["c", "r"], ["ic", "ir"]]
    assert [sorted(s.reads) for s in came] == [["c", "r"], ["c", "ic", "ir", "r"]]
    assert [s.passes for s in split(ao.CAME(lr=0.1, clip_threshold=None)).segments] == [(0, 1, 2)]
    assert [s.passes for s in split(ao.Adafactor()).segments] == [(0, 1), (2,)]


def test_what_a_slot_holds_is_not_carried_and_what_none_holds_is():
    for rule in (ao.CAME(lr=0.1), ao.Adafactor()):
        assert all(not s.carried for s in split(rule).segments)
        assert split(rule).layout.vectors == {}
    first, second = split(ao.CAME(lr=0.1, grad_centralization=True), rank=3).segments
    assert [n.axes for n in second.carried] == ["A"]
    assert not first.carried


def test_sums_that_are_not_over_matrices_are_left_to_the_other_way():
    assert split(ao.CAME(lr=0.1, grad_centralization=True), rank=4) is None
    assert split(ao.CAME(lr=0.1), rank=2) is None
    assert split(ao.LAMB()) is None


def test_which_tensors_are_laid_side_by_side():
    assert [suits(shape) for shape in [(3, 3), (9, 3, 3), (4, 9, 16, 16), (4, 9, 16, 17), (9,), ()]] == [
        *(False, True, True, False, False, False)
    ]


@pytest.mark.parametrize("room", [1, 1000, 1 << 16])
def test_units_cover_each_matrix_once(room):
    shapes = [shape for name, shape in KERNELS if len(shape) == 4 and 0 not in shape]
    for (a, b, r, c), geo in zip(shapes, segment_geometry(shapes, "ABRC", room), strict=True):
        assert (geo["A"], geo["B"], geo["R"], geo["C"]) == (a, b, r, c)
        assert (geo["UNITS"] - 1) * geo["G"] < a * b <= geo["UNITS"] * geo["G"]


RULES = {
    "CAME": ao.CAME(lr=0.1, weight_decay=0.1),
    "CAME, centralized": ao.CAME(lr=0.1, grad_centralization=True),
    "CAME, no limit": ao.CAME(lr=0.1, clip_threshold=None, scale_parameter=True),
    "Adafactor": ao.Adafactor(beta1=0.9),
}


@pytest.mark.parametrize(
    ("engine", "name"),
    marked(
        ((e, name) for e in FUSED for name in RULES),
        lambda e, name: e not in COMPILED or (name == "Adafactor" and e not in SLOW),
    ),
)
def test_kernels_agree_with_the_reference(engine, name):
    shapes = KERNELS if engine not in COMPILED or name == "CAME, centralized" else RANK_FOUR
    params, grads = problem(shapes if engine not in COMPILED or name != "Adafactor" else FULL)
    agree(run(engine, RULES[name], params, grads)[1], run("array_api", RULES[name], params, grads)[1])


@each_fused
def test_kernels_of_another_dtype(engine):
    params, grads = problem(RANK_FOUR, "float16")
    rule = RULES["CAME"]
    (found, _), (expected, _) = (run(e, rule, params, grads) for e in (engine, "array_api"))
    for name, p in expected.params.items():
        assert found.params[name].dtype == "float16"
        np.testing.assert_allclose(found.params[name], p, rtol=2.0**-9, atol=1e-3, err_msg=name)


@each_fused
def test_reports_of_kernels(engine):
    params, grads = problem(RANK_FOUR)
    stats = [run(e, RULES["CAME"], params, grads, stats=True)[0].stats.read() for e in (engine, "array_api")]
    assert stats[0].keys() == stats[1].keys()
    for name, report in stats[1].items():
        assert stats[0][name] == pytest.approx(report, rel=1e-5), name


@each_fused
def test_arrays_that_do_not_lie_in_order(engine):
    rule = RULES["Adafactor" if engine in COMPILED else "CAME"]
    params, grads = problem(FULL, steps=2)
    turned = {name: np.asfortranarray(p) for name, p in params.items()}
    opts = [ao.Optimizer({k: p.copy("K") for k, p in x.items()}, rule, engine=engine) for x in (params, turned)]
    for g in grads:
        opts[0].step(g)
        opts[1].step({name: np.asfortranarray(x) for name, x in g.items()})
    assert not opts[1].params["3 x 3"].flags.c_contiguous
    same([contents(opts[1])], [contents(opts[0])])


@each_fused
def test_threads_change_no_bit_of_kernels(engine, monkeypatch):
    """One tensor is large enough to be shared by all threads."""
    rule = RULES["Adafactor" if engine in COMPILED else "CAME"]
    params, grads = problem((("large", (400, 300, 3, 3)), ("1 x 1", (300, 31, 1, 1))), steps=2)
    runs = {}
    for threads in (1, 2, 3):
        monkeypatch.setenv("ARRAYOPT_NUM_THREADS", str(threads))
        runs[threads] = run(engine, rule, params, grads)[1]
    same(runs[2], runs[1])
    same(runs[3], runs[1])


def odd(xp, p, g, s, h):
    """The old row averages are still read after the limit, which is of the whole tensor; so are the old columns."""
    r, c = (s["rows"] + xp.mean(g * g, axis=-1)) / 2, xp.mean(g, axis=-2)
    u = g / (1.0 + xp.expand_dims(r, axis=-1))
    u = u / xp.maximum(xp.mean(u * u), 1.0)
    return p - h.lr * u * xp.expand_dims(s["rows"], axis=-1) - xp.expand_dims(s["columns"], axis=-2), {
        "rows": r,
        "columns": c + s["columns"],
    }


@each_fused
def test_a_slot_is_written_when_nothing_reads_its_old_value_any_more(engine):
    rule = made(
        odd, lambda xp, p: {"rows": xp.zeros_like(xp.sum(p, axis=-1)), "columns": xp.zeros_like(xp.sum(p, axis=-2))}
    )()
    assert [sorted(s.writes) for s in split(rule).segments] == [[], ["columns", "rows"]]
    params, grads = problem((("k", (37, 5, 3, 3)),))
    agree(run(engine, rule, params, grads)[1], run("array_api", rule, params, grads)[1])


@pytest.mark.parametrize(
    ("name", "engine"),
    marked(
        [(name, engine) for engine in FUSED for name in ("rows", "rows exchanged", "numbers")],
        lambda name, engine: engine not in SLOW or name == "numbers",
    ),
)
def test_slots_that_exchange_what_they_hold(name, engine):
    slots, update = ALIASES[name]
    rule, start, g = made(update, slots)(), np.linspace(-1, 1, 24).reshape(4, 2, 3), np.linspace(0, 2, 24)
    p, state = start, rule.init(start)
    opt = ao.Optimizer(start.copy(), rule, engine=engine)
    for _ in range(2):
        p, state = ao.update(rule, p, g.reshape(p.shape), state)
        opt.step(g.reshape(p.shape))
    np.testing.assert_allclose(opt.params, p, rtol=1e-12)
    for slot, x in state["tensors"]["param"].items():
        np.testing.assert_allclose(opt.state["param"][slot], x, rtol=1e-12, err_msg=slot)


@pytest.mark.parametrize("name", ALIASES)
def test_the_text_for_every_alias_can_be_read(name):
    slots, update = ALIASES[name]
    try:
        plan = plan_for(made(update, slots)(), 3, "float32", shape=(4, 2, 3))
    except TraceError:
        return
    if in_segments(plan) is not None:
        compile(ENGINES["numba"].emitter()(plan, "float32", segmented=in_segments(plan)), "<segments>", "exec")

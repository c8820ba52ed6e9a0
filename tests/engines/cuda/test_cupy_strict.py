"""Parts of the CuPy engine where tests missed faults: absent gradients, addresses, rounding, offsets, CUDA graphs."""

import mmap
from dataclasses import dataclass
from typing import final

import ml_dtypes
import numpy as np
import pytest

import arrayopt as ao
from arrayopt.engines.cuda.columns import COLUMNS, hyper_names
from arrayopt.engines.cuda.emit import emit
from arrayopt.engines.cuda.pieces import pieces, tiles
from arrayopt.engines.cuda.queue import TICKET
from arrayopt.fusion.layout import GEOMETRY, device_layout, geometry
from arrayopt.fusion.lower_stages import in_stages
from arrayopt.fusion.plans import plan_for
from tests.cudacpu import Module, standin
from tests.engines.cuda.test_cupy import compare, numbers, pair, step, trees
from tests.engines.cuda.test_cupy_steps import FULL, on_host_only
from tests.support.slow import marked

# ---- which tensors, and where they lie ------------------------------------------------------------------------------

SOME = {"a": (9000,), "b": (37,), "c": (5000,), "d": (37,), "e": (8193,), "f": (2,)}
LEFT_OUT = ["", "a", "c", "bd", "df", "abce", "a", "abcdf", "bcdef", ""]
"""Of the same number, again, and more or less than half of all elements."""


def test_tensors_that_are_left_out_stay_as_they_are(cupy):
    opts = pair(cupy, ao.LAMB(lr=0.1), SOME)
    with standin.checking(random=True, seed=3, workers=3):
        for k, without in enumerate(LEFT_OUT):
            step(cupy, opts, SOME, seed=10 * k, without=without)
    compare(opts)


def shifted(cupy, x, by):
    """The same values, `by` elements after the beginning of an allocation."""
    room = cupy.zeros(x.size + by, x.dtype)
    view = room[by:].reshape(x.shape)
    view[...] = cupy.asarray(x)
    return view


RULES = [(ao.LAMB(lr=0.1),), (ao.CAME(lr=0.01),)]


@pytest.mark.parametrize("by", [1, 2], ids=["by 4 bytes", "by 8 bytes"])
@pytest.mark.parametrize("which", ["parameter", "gradient"])
@pytest.mark.parametrize("rule", marked(RULES, lambda x: type(x) is ao.LAMB, lambda x: type(x).__name__))
def test_words_are_read_only_where_all_is_aligned(cupy, rule, which, by):
    x, gs = numbers((37, 132), "float32", 1), [numbers((37, 132), "float32", k) for k in (2, 3)]
    there = shifted(cupy, x, by if which == "parameter" else 0)
    opts = [ao.Optimizer({"w": w}, rule, engine=e) for w, e in ((x.copy(), "array_api"), (there, "cupy"))]
    for k, g in enumerate(gs):
        opts[0].step({"w": g})
        opts[1].step({"w": shifted(cupy, g, by if k and which == "gradient" else 0)})
    compare(opts)


def test_a_parameter_is_replaced_by_one_that_is_not_aligned(cupy):
    """The gradients are those of the steps before, so that nobody looks at them again."""
    opts, grads = pair(cupy, ao.LAMB(lr=0.1), {"w": (37, 132)}), numbers((37, 132), "float32", 2)
    given = {"w": grads}, {"w": cupy.asarray(grads)}
    for k in range(6):
        if k == 4:
            opts[1].params["w"] = shifted(cupy, opts[1].params["w"].get(), 1)
        for opt, x in zip(opts, given, strict=True):
            opt.step(x)
    compare(opts)


@pytest.mark.parametrize("name", marked([("CAME",), ("Adafactor",)], lambda name: name == "CAME"))
def test_several_matrices_of_several_tiles(cupy, name):
    """Tiles along rows and columns, in each of six matrices: each partial sum has a place of its own.

    And small matrices, a thread's each. Some have sums that are put together one after the other by a whole block.
    """
    shapes = {"w": (3, 2, 70, 140), "kernels": (5, 4, 3, 3), "narrow": (2, 1, 40, 9), "wide": (1, 1, 3, 300)}
    rule = ao.CAME(lr=0.01) if name == "CAME" else ao.Adafactor()
    with standin.checking(random=True, seed=1, workers=3):
        opts = pair(cupy, rule, shapes)
        for k in range(2):
            step(cupy, opts, shapes, seed=k)
        compare(opts, loose=10)


@dataclass(frozen=True, kw_only=True, repr=False)
class OfMatrices(ao.Rule):
    """Divides by a norm of each matrix."""

    lr: float = ao.real("[0, inf)", 0.1)

    def slots(self, xp, p):
        return {}

    def update(self, xp, p, g, s, h):
        return p - h.lr * g / xp.sqrt(xp.mean(g * g, axis=(-2, -1), keepdims=True)), {}


def test_each_of_several_matrices_of_a_piece_has_a_sum(cupy):
    """By warps, by threads, and of several tiles."""
    shapes = {"three": (5, 4, 20, 30), "small": (70, 5, 3, 3), "tiles": (2, 3, 70, 140)}
    with standin.checking(check=False):
        opts = pair(cupy, OfMatrices(lr=0.1), shapes)
        step(cupy, opts, shapes)
        compare(opts)


# ---- numbers --------------------------------------------------------------------------------------------------------


HALVES = [(ml_dtypes.bfloat16,), (np.float16,)]


@pytest.mark.parametrize("dtype", marked(HALVES, lambda x: x is ml_dtypes.bfloat16, lambda x: np.dtype(x).name))
def test_ties_are_rounded_to_even_and_nan_stays_nan(cupy, dtype):
    """What comes out lies half way between two numbers, in float32 exactly."""
    bits = 7 if dtype is ml_dtypes.bfloat16 else 10
    whole = (1 + np.arange(2**bits) * 2.0**-bits).astype(dtype)
    half = np.full(whole.shape, -(2.0 ** -(bits + 1))).astype(dtype)
    whole[-1] = np.nan
    x = cupy.asarray(whole)
    ao.Optimizer({"w": x}, ao.SGD(lr=1.0), engine="cupy").step({"w": cupy.asarray(half)})
    expected = (whole.astype("f4") - half.astype("f4")).astype(dtype)
    np.testing.assert_array_equal(x.get().astype("f4"), expected.astype("f4"))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bfloat16", "float16"])
def test_the_nan_of_a_gpu_stays_nan(cupy, dtype):
    """All its bits are set: rounded like a number, it would be a zero."""
    x = cupy.asarray(np.ones(8, dtype))
    nan = np.full(8, 0x7FFFFFFF, np.uint32).view(np.float32)
    ao.Optimizer({"w": x}, ao.SGD(lr=1.0), engine="cupy").step({"w": cupy.asarray(nan)})
    assert np.isnan(x.get().astype("f4")).all()


def test_a_joint_norm_of_which_the_square_is_no_number(cupy):
    opts = pair(cupy, ao.SGD(lr=1.0), FULL, "float64", clip_norm=1.0)
    for opt, xp in zip(opts, (np, cupy), strict=True):
        opt.step({name: xp.asarray(g * 1e200) for name, g in trees(FULL, "float64", 3).items()})
    norms = [float(opt.stats.global_norm) for opt in opts]
    assert norms[1] == pytest.approx(norms[0], rel=1e-12)
    assert 1e200 < norms[1] < np.inf
    compare(opts, "float64")


# ---- more than 2**31 elements ---------------------------------------------------------------------------------------


def lazily(count, dtype):
    """Zeros, of which the system has only the pages that are touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return np.frombuffer(mmap.mmap(-1, count * np.dtype(dtype).itemsize, flags=flags), dtype)


def last_piece(rule, shape, values):
    """Run the last piece of the first pass over a tensor; its arrays, and the partial sums.

    `values` are what the last elements of arrays are.
    """
    plan = plan_for(rule, len(shape), "float32", lean=True)
    geo, where = geometry([shape], plan.element), device_layout(plan)
    tiles(geo, plan.element)
    made = in_stages(plan).stages
    first = next(j for j, stage in enumerate(made) if stage.kind == "pass")
    lengths = where.lengths(geo)
    names, used = ["p", "g", *plan.slots, *plan.spilled], {*plan.passes[0].loads, *plan.passes[0].stores}
    arrays = {name: lazily(int(np.prod(shape)), np.float32) for name in used}
    for name, x in values.items():
        arrays[name][-x.size :] = x
    row = np.zeros((1, len(COLUMNS) + len(names) + lengths.shape[1]), np.int64)
    row[:, : len(GEOMETRY)] = geo[0].tolist()
    for name, x in arrays.items():
        row[0, len(COLUMNS) + names.index(name)] = x.ctypes.data
    row[0, len(COLUMNS) + len(names) :] = np.cumsum(lengths) - lengths
    scalars, work = np.zeros((1, max(1, len(plan.scalars)))), lazily(int(lengths.sum()) + 1, np.float32)
    room = np.zeros((1, max(1, len(where.tensor))))
    working = np.zeros((1, len(plan.scalars) + room.size), np.float32)
    numbers = np.array([[float(rule.at(0)[name]) for name in hyper_names(plan)] or [0.0]])
    taken, done, counts, factor = np.zeros(1, "u4"), np.zeros(1, "u4"), np.zeros((1, 2), "i8"), np.ones(1)
    module = Module(code=emit(plan, "float32", "float32"), names=["prepare", "run"])
    one = np.int32(1)
    given = (row, None, one, numbers, counts, scalars, working, taken, one, done, factor, None, None)
    module.get_function("prepare")((1,), (256,), given)
    queue = np.zeros(1, TICKET)
    queue["count"] = 1
    queue["piece"], queue["stage"], queue["stop"] = pieces(made, geo)[0, first] - 1, first, first + 1
    there = np.array([x.ctypes.data for x in (row, scalars, room, work, working)], "u8")
    there = there.view([(c, "u8") for c in "abcde"])
    run = (there.reshape(()), queue.view("i4"), np.int32(0), one, taken, done, None, None, None)
    module.get_function("run")((1,), (256,), run)
    return arrays, work


def test_a_row_of_more_elements_than_32_bits_count():
    n, tail = 2**31 + 3 * 4096 + 5, 5
    ones = np.ones(tail)
    arrays, _ = last_piece(ao.SGD(lr=0.5), (n,), {"p": ones, "g": ones})
    np.testing.assert_array_equal(arrays["p"][-tail:], 0.5 * ones)


def test_a_matrix_of_more_elements_than_32_bits_count():
    rows, columns = 2**16 + 1, 2**15
    _, work = last_piece(ao.Adafactor(), (rows, columns), {"g": np.full(128, 2.0)})
    assert work.max() == 4 * 128, "the sum of the squares of the last row, in its last tile"


# ---- graphs ---------------------------------------------------------------------------------------------------------


def captured(cupy, opt, stream, grads):
    """A graph of a step."""
    with stream:
        opt.advance()
        stream.begin_capture()
        opt.launch(grads)
        return stream.end_capture()


@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.5}], ids=["plain", "a limit"])
def test_a_graph_finds_all_that_it_needs_however_many_steps_later(cupy, options):
    """Also where the captured step left a tensor out, and what was kept for such steps has long been dropped."""
    opts = pair(cupy, ao.LAMB(lr=0.1), SOME, **options)
    values = trees(SOME, "float32", 5)
    there = {name: cupy.asarray(g) for name, g in values.items()}
    others = [{name for i, name in enumerate(SOME) if k >> i & 1} for k in range(1, 13)]
    patterns = [set(), {"a", "e"}, {"a", "e"}, *others, {"a", "e"}]
    given = [[{n: None if n in out else g for n, g in x.items()} for out in patterns] for x in (values, there)]
    for grads in given[0]:
        opts[0].step(grads)
    stream = cupy.cuda.Stream(non_blocking=True)
    for grads in given[1][:2]:
        opts[1].step(grads)
    cupy.cuda.get_current_stream().synchronize()
    graph = captured(cupy, opts[1], stream, given[1][2])
    with stream:
        graph.launch(stream)
        for grads in given[1][3:-1]:
            opts[1].step(grads)
        opts[1].advance()
        graph.launch(stream)
    stream.synchronize()
    compare(opts)


def test_gradients_of_a_graph_live_as_long_as_it_may_be_replayed(cupy):
    on_host_only(cupy)
    opts = pair(cupy, ao.LAMB(lr=0.1), FULL)
    values = trees(FULL, "float32", 5)
    grads = {name: cupy.asarray(g) for name, g in values.items()}
    stream = cupy.cuda.Stream(non_blocking=True)
    opts[1].step(grads)
    cupy.cuda.get_current_stream().synchronize()
    graph = captured(cupy, opts[1], stream, grads)
    grads.clear()
    with stream:
        graph.launch(stream)
    stream.synchronize()
    for _ in range(2):
        opts[0].step(values)
    compare(opts)


def test_counts_that_a_replay_has_moved_on_are_fetched(cupy):
    opt = pair(cupy, ao.LAMB(), FULL)[1]
    grads = {name: cupy.asarray(g) for name, g in trees(FULL, "float32", 5).items()}
    opt.step(grads)
    assert opt.state["w"]["t"] == 1  # the host has them again
    stream = cupy.cuda.Stream(non_blocking=True)
    graph = captured(cupy, opt, stream, grads)
    with stream:
        graph.launch(stream)
        opt.advance()
        graph.launch(stream)
    stream.synchronize()
    assert opt.state["w"]["t"] == opt.step_count == 3


@pytest.mark.parametrize("how", ["load_state_dict", "load"])
def test_a_replay_goes_on_from_a_loaded_state(cupy, how, tmp_path):
    """It is written to the addresses that the graph reads."""
    opts = pair(cupy, ao.AdamW(lr=0.1), FULL)
    values = trees(FULL, "float32", 5)
    there = {name: cupy.asarray(g) for name, g in values.items()}
    states, stream = [], cupy.cuda.Stream(non_blocking=True)
    for i, (opt, grads) in enumerate(zip(opts, (values, there), strict=True)):
        opt.step(grads)
        states.append(opt.state_dict() if how == "load_state_dict" else tmp_path / str(i))
        if how == "load":
            opt.save(states[-1])
    graph = captured(cupy, opts[1], stream, there)
    with stream:
        graph.launch(stream)
        opts[0].step(values)
        for opt, state in zip(opts, states, strict=True):
            getattr(opt, how)(state)
        for _ in range(2):
            opts[0].step(values)
            opts[1].advance()
            graph.launch(stream)
    stream.synchronize()
    compare(opts)


def test_a_replay_does_not_go_on_with_an_array_that_was_replaced(cupy):
    opt = pair(cupy, ao.AdamW(lr=0.1), FULL)[1]
    grads = {name: cupy.asarray(g) for name, g in trees(FULL, "float32", 5).items()}
    opt.step(grads)
    stream, old = cupy.cuda.Stream(non_blocking=True), opt.params["w"]
    cupy.cuda.get_current_stream().synchronize()
    graph = captured(cupy, opt, stream, grads)
    with stream:
        graph.launch(stream)
        opt.params["w"] = old.copy()
        with pytest.raises(ValueError, match="arrays of w must be the arrays of the captured step"):
            opt.advance()
        opt.params["w"] = old
        with pytest.raises(ValueError, match="arrays of w must be the arrays of the captured step"):
            opt.step({**grads, "w": grads["w"].copy()})
        opt.advance()
        graph.launch(stream)
    stream.synchronize()
    assert opt.state["w"]["t"] == opt.step_count == 3


def test_a_replay_does_not_go_on_with_a_slot_that_was_replaced(cupy):
    opt = pair(cupy, ao.AdamW(lr=0.1), FULL)[1]
    grads = {name: cupy.asarray(g) for name, g in trees(FULL, "float32", 5).items()}
    opt.step(grads)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    captured(cupy, opt, stream, grads)
    bucket = opt._step.buckets[0]
    tensor = next(x for x in bucket.tensors if x.name == "w")
    tensor.slots["m"] = tensor.slots["m"].copy()
    bucket.run.arrays += 1
    with stream, pytest.raises(ValueError, match="arrays of w must be the arrays of the captured step"):
        opt.advance()


def test_a_replay_of_a_step_of_which_nothing_else_is_kept_has_new_numbers(cupy, monkeypatch):
    """Gradients of another dtype have a table of their own, for which that of the graph is dropped."""
    from arrayopt.engines import bucket

    monkeypatch.setattr(bucket, "KEPT", 1)
    opts = pair(cupy, ao.AdamW(lr=lambda s: 0.1 / (1 + s)), FULL)
    values = trees(FULL, "float32", 5)
    there = {name: cupy.asarray(g) for name, g in values.items()}
    half = [{name: g.astype("f2") for name, g in grads.items()} for grads in (values, there)]
    opts[1].step(there)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    graph = captured(cupy, opts[1], stream, there)
    with stream:
        graph.launch(stream)
        opts[1].step(half[1])
        opts[1].advance()
        graph.launch(stream)
    stream.synchronize()
    for grads in (values, values, half[0], values):
        opts[0].step(grads)
    compare(opts)


@pytest.mark.parametrize("change", ["structure", "group"])
def test_a_step_is_captured_again_where_groups_have_changed(cupy, change):
    opts = pair(cupy, ao.LAMB(lr=0.1), FULL)
    values = trees(FULL, "float32", 5)
    given = [values, {name: cupy.asarray(g) for name, g in values.items()}]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for opt, grads in zip(opts, given, strict=True):
            opt.step(grads)
            opt.step(grads) if opt is opts[0] else captured(cupy, opt, stream, grads).launch(stream)
        for opt, grads, xp in zip(opts, given, (np, cupy), strict=True):
            if change == "group":
                opt.add_group({"more": xp.ones(5, "f4")})
                grads["more"] = xp.ones(5, "f4")
            else:
                opt.adapt = False
            opt.step(grads)
        graph = captured(cupy, opts[1], stream, given[1])
        for k in range(3):
            opts[0].step(values)
            if k:
                opts[1].advance()
            graph.launch(stream)
    stream.synchronize()
    compare(opts)


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Apart(ao.Rule):
    """A step by sums to which a zero that no element holds would add."""

    def slots(self, xp, p):
        return {}

    def update(self, xp, p, g, s, h):
        far = (g - 1.0) * (g - 1.0)
        return p + xp.sum(far, axis=-1, keepdims=True) + xp.sum(far), {}


def test_what_lies_behind_the_last_element_is_in_no_sum(cupy):
    shapes = {"row": (4099,), "matrix": (5, 131), "narrow": (3, 7), "stack": (2, 3, 131)}
    opts = pair(cupy, Apart(), shapes)
    step(cupy, opts, shapes)
    compare(opts)

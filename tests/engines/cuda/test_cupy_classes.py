"""Properties of the CuPy engine each of which a whole class of faults would break; see planted.py."""

import copy
import gc
import re
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import pytest

import arrayopt as ao
from tests.cudacpu import standin
from tests.engines.cuda.test_cupy import compare, pair, step, trees

TAILS = {f"n{n}": (n,) for n in (3, 4, 1023, 1028, 2051, 2056, 3075, 3080, 4095, 4096 + 2056, 2 * 4096 + 3080)}
"""Sizes whose last piece has none, one, two or three of the vectors that a thread reads at once."""


@pytest.mark.parametrize("name", ["LARS", "LANS"])
def test_vectors_that_are_read_ahead_end_where_tensors_end(cupy, name):
    """Two (LARS) and four (LANS, and what measures gradients) are; the stand-in finds what is read behind the end."""
    opts = pair(cupy, getattr(ao, name)(lr=0.1), TAILS, clip_norm=0.5)
    for k in range(2):
        step(cupy, opts, TAILS, seed=k)
    compare(opts)


PIECES = {"w": (40_001,), "even": (9 * 4096,), "tail": (7 * 4096 + 2,), "one": (33,)}


@pytest.mark.parametrize("name", ["LANS", "CAME"])
def test_all_pieces_of_a_ticket_are_done(cupy, name, monkeypatch):
    """LANS asks for the next one ahead, and takes them as one stretch in its last pass; one array is not at a word."""
    from arrayopt.engines.cuda import launches

    monkeypatch.setattr(launches, "MANY", 1)
    monkeypatch.setattr(launches, "_resident", lambda: 2)
    shapes = PIECES if name != "CAME" else {"w": (500, 300), "b": (700, 260)}
    opts = pair(cupy, getattr(ao, name)(lr=0.1), shapes)
    for k in range(2):
        grads = trees(shapes, "float32", k)
        there = {n: cupy.asarray(g) for n, g in grads.items()}
        there["w"] = cupy.asarray(np.append(np.zeros(1, "f4"), grads["w"]))[1:].reshape(shapes["w"])
        with standin.checking(random=True, seed=k, workers=2):
            for opt, given in zip(opts, (grads, there), strict=True):
                opt.step(given)
    batches = [x for made in opts[1]._step.buckets[0].batches.values() for x in made]
    assert max(int(x.launcher.queue.tickets["count"].max()) for x in batches) > 1
    compare(opts)


def norm(cupy, shapes, grads, **options):
    """The global norm of some gradients, as bits."""
    params = {name: cupy.zeros(shape, "f4") for name, shape in shapes.items()}
    opt = ao.Optimizer(params, ao.SGD(lr=0.1), engine="cupy", clip_norm=1.0, **options)
    opt.step({name: cupy.asarray(g) for name, g in grads.items()})
    return opt.stats.global_norm.get().tobytes()


def test_the_joint_norm_has_the_same_bits_however_tensors_are_grouped(cupy):
    """It is added up in the order of the tensors, and not by rule, rank or bucket."""
    shapes = {f"w{i:02}": (1 + i % 3,) * (1 + i % 2) for i in range(60)}
    grads = {name: g * 10.0 ** (i % 7 - 3) for i, (name, g) in enumerate(trees(shapes, "float32", 5).items())}
    names, other = list(shapes), ao.Adam(lr=0.1)
    expected = norm(cupy, shapes, grads)
    for some in (names[::2], names[1::3], names[30:], names[:7]):
        assert norm(cupy, shapes, grads, groups=dict.fromkeys(some, other)) == expected, some


def test_what_a_graph_reads_lives_as_long_as_the_optimizer(cupy):
    """A graph of its own reads the loss scale; then the tensors are sorted anew, and what decides is made anew."""
    opts = pair(cupy, ao.SGD(lr=0.1, momentum=0.9), {"w": (9,), "b": (3,)}, loss_scale=ao.LossScale(init=4.0))
    for k in range(2):
        step(cupy, opts, {"w": (9,), "b": (3,)}, seed=k)
    seen, stream = cupy.zeros(1, "f8"), cupy.cuda.Stream(non_blocking=True)
    with stream:
        opts[1].advance()
        stream.begin_capture()
        seen[...] = opts[1].loss_scale.reshape(1)
        graph = stream.end_capture()
        for opt in opts:
            opt.groups[0].nesterov = True  # another structure
        step(cupy, opts, {"w": (9,), "b": (3,)}, seed=3)
        for opt, xp in zip(opts, (np, cupy), strict=True):
            opt.advance()
            opt.launch({name: xp.asarray(g) for name, g in trees({"w": (9,), "b": (3,)}, "float32", 3).items()})
        gc.collect()
        graph.launch(stream)
        assert seen.get().tolist() == [4.0]
    compare(opts)


@pytest.mark.parametrize("layer", range(3))
def test_one_layer_is_skipped_whichever_it_is(cupy, layer):
    """The first and the last, too: the others go on, and the step is made; so do all in a step that skips no layer."""
    shapes = {"a": (3, 4), "b": (3, 5), "c": (2, 4), "x": (4,)}
    groups = {"x": {"stacked": False}}
    options = {"skip_nonfinite": True, "stats": True, "clip_norm": 1e3}  # each step has a factor
    opts = pair(cupy, ao.AdamW(lr=0.1, stacked=True), shapes, groups=groups, **options)
    for k in range(3):
        grads = trees(shapes, "float32", k)
        if k == 1:
            grads["a"][layer, 2] = np.nan
        for opt, xp in zip(opts, (np, cupy), strict=True):
            opt.step({name: xp.asarray(g) for name, g in grads.items()}, loss_scale=2.0 if k == 2 else None)
        host, there = (
            {name: set(map(np.isfinite, x.values())) for name, x in opt.stats.read().items()} for opt in opts
        )
        left = {f"{name}[{layer}]" for name in "ab"} if k == 1 else set()
        assert {name for name, finite in there.items() if finite != {True}} == left
        assert set(host) == set(there) - left
    compare(opts)
    assert opts[1].skipped_layers()["a"].tolist() == [int(i == layer) for i in range(3)]
    assert int(opts[1].stats.skipped) == 0


def test_tensors_that_take_the_place_of_layers_are_none(cupy):
    """As many norms as in the step before, none of them of a layer: what is not finite skips the step."""
    shapes = {"a": (3, 4), "x": (5,), "y": (4,), "z": (3,)}
    groups = {name: {"stacked": False} for name in "xyz"}
    opts = pair(cupy, ao.AdamW(lr=0.1, stacked=True), shapes, groups=groups, skip_nonfinite=True)
    for k, some in enumerate(("a", "xyz", "a")):
        grads = {name: g if name in some else None for name, g in trees(shapes, "float32", k).items()}
        if some == "xyz":
            grads["z"][1] = np.nan
        for opt, xp in zip(opts, (np, cupy), strict=True):
            opt.step({name: g if g is None else xp.asarray(g) for name, g in grads.items()})
    compare(opts)
    assert int(opts[1].stats.skipped) == opts[0].stats.skipped == 1


def test_a_step_that_failed_after_a_load_divides_by_the_scale_that_was_loaded(cupy, monkeypatch):
    """What was sent to the device for the failed step is what the next one finds there."""
    shapes, scale = {"w": (9,), "b": (3,)}, ao.LossScale(init=1024.0, window=1)
    opts = pair(cupy, ao.SGD(lr=0.1), shapes, accumulate=2, loss_scale=scale)
    saved = [opt.state_dict() for opt in opts]
    for k in range(4):
        step(cupy, opts, shapes, seed=k)
    for opt, state in zip(opts, saved, strict=True):
        opt.load_state_dict(state)
    step(cupy, opts, shapes, seed=5)

    def fail(*_, **__):
        raise MemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(type(opts[1]._step), "_prepare", fail)
        for opt, xp in zip(opts, (np, cupy), strict=True):
            with pytest.raises(MemoryError, match="no room"):
                opt.step({x: xp.asarray(g) for x, g in trees(shapes, "float32", 6).items()})
    for k in range(6, 9):
        step(cupy, opts, shapes, seed=k)
    compare(opts)


@dataclass(frozen=True, kw_only=True, repr=False)
class OverRows(ao.Rule):
    """A step with sums and maxima over one axis, then sums over several of the others, and over each of these."""

    over = -1

    def slots(self, xp, p):
        return {}

    def update(self, xp, p, g, s, h):
        over = self.over if g.ndim > 1 else -1
        few = xp.sqrt(xp.mean(g * g, axis=over, keepdims=True))
        made = xp.mean(few) + xp.mean(xp.max(g, axis=over, keepdims=True))
        for axes in [tuple(range(g.ndim - 1)), *((axis,) for axis in range(g.ndim))]:
            made = made + xp.mean(few, axis=axes, keepdims=True)
        return p - made, {}


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class OverColumns(OverRows):
    over = -2


@pytest.mark.parametrize("rule", [OverRows(), OverColumns()], ids=["rows", "columns"])
def test_sums_over_several_axes_of_what_goes_over_few(cupy, rule):
    shapes = {"row": (999,), "matrix": (5, 131), "tall": (300, 3), "stack": (3, 20, 7), "more": (2, 3, 5, 7)}
    shapes |= {"nine": (9, 20, 3)}  # whose sums are a warp's each
    opts = pair(cupy, rule, shapes)
    step(cupy, opts, shapes)
    compare(opts)


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Counting(ao.Rule):
    """A step by the number of updates beyond 2**24, up to which float32 has all numbers."""

    def slots(self, xp, p):
        return {}

    def update(self, xp, p, g, s, h):
        return p - g * (h.t - 2.0**24), {}


def test_numbers_of_updates_beyond_those_of_float32(cupy):
    opts = pair(cupy, Counting(), {"w": (9,)})
    for opt in opts:
        opt.step_count = 2**24
        saved = opt.state_dict()
        saved["tensors"]["w"]["t"] = 2**24
        opt.load_state_dict(saved)
    for k in range(3):
        step(cupy, opts, {"w": (9,)}, seed=k)
    compare(opts)
    assert opts[1].state["w"]["t"] == 2**24 + 3


def test_matrices_that_lie_unevenly_in_one_array_and_evenly_in_another(cupy):
    """Matrices of 5 x 8 follow each other in all tensors; their squares, of 5 x 5, have gaps between tensors.

    That of another matrix takes three pieces.
    """
    shapes = {"a": (2, 5, 8), "b": (2, 5, 8), "c": (2, 8, 5), "d": (3, 5, 8), "e": (1, 95, 97)}
    opts = pair(cupy, ao.Muon(lr=0.1, ns_steps=2, matrix="last"), shapes)
    for k in range(2):
        step(cupy, opts, shapes, seed=k)
    compare(opts, loose=20)


def test_a_copy_knows_the_stream_that_it_was_made_on(cupy):
    """What is given to do on another stream waits for that one: the stand-in raises where nothing orders the two."""
    one, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    with one:
        opts = pair(cupy, ao.SGD(lr=0.1, momentum=0.9), {"w": (9,)})
        step(cupy, opts, {"w": (9,)}, seed=1)
        copied = [copy.deepcopy(opt) for opt in opts]
    with other:
        step(cupy, copied, {"w": (9,)}, seed=2)
        compare(copied)


@pytest.mark.parametrize("same", [True, False], ids=["the same arrays", "others"])
@pytest.mark.parametrize("which", ["w", "b"])
def test_one_of_several_gradients_is_not_contiguous(cupy, which, same):
    """Several times, since where the gradients are is remembered: of the same arrays from the third time on."""
    shapes = {"w": (5, 4), "b": (4, 5)}
    opts, there = pair(cupy, ao.SGD(lr=0.1), shapes), {}
    for k in range(5 if same else 2):
        grads = trees(shapes, "float32", 10 + k)
        opts[0].step(grads)
        given = {name: cupy.asarray(g.T.copy()).T if name == which else cupy.asarray(g) for name, g in grads.items()}
        there = there if same and there else given
        for name, g in given.items():
            there[name][...] = g
        opts[1].step(there)
    compare(opts)


def test_a_parameter_is_replaced_after_a_capture(cupy):
    """A replay would write to the old one, and say nothing; so `advance` does."""
    opt = pair(cupy, ao.SGD(lr=0.1), {"w": (5, 4)})[1]
    grads, stream = {"w": cupy.ones((5, 4), "f4")}, cupy.cuda.Stream(non_blocking=True)
    opt.step(grads)
    with stream:
        opt.advance()
        stream.begin_capture()
        opt.launch(grads)
        stream.end_capture()
        opt.params["w"] = opt.params["w"].copy()
        with pytest.raises(ValueError, match="arrays of w must be the arrays of the captured step"):
            opt.advance()


def test_kernels_are_compiled_without_fused_multiply_adds():
    """Else their bits are no CPU's, on a device alone."""
    folder = Path(ao.__file__).parent / "engines" / "cuda"
    texts = [path.read_text("utf-8") for path in folder.glob("*.py")]
    assert {x for text in texts for x in re.findall(r"RawModule\(.*options=(\w+)\)", text)} == {"OPTIONS"}
    assert '"-fmad=false"' in (folder / "device.py").read_text("utf-8")

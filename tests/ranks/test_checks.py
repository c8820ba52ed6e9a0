"""What is not the same on all ranks is noticed, and said on all of them: gradients, parameters, hooks."""

import re
from functools import partial

import ml_dtypes
import numpy as np
import pytest
import torch

import arrayopt as ao
from arrayopt.engines.registry import ENGINES
from tests.conftest import BACKENDS
from tests.support.engines import each_compiled, each_engine
from tests.support.ranks import contents, differing, gradients, parameters, train

SHAPES = {"w": (40, 50), "b": (50,), "s": ()}


def takes(row, library):
    """Whether an engine takes a library's arrays here."""
    return not row.takes or library in row.takes


def refused(call):
    """What a call raised, as text."""
    with pytest.raises((ValueError, ao.RankError)) as caught:
        call()
    return f"{caught.type.__name__}: {caught.value}"


def steps(comm, bad, n=1, how=None, **options):
    """An optimizer that has made some steps, and then one whose gradients a function changes."""
    there = ao.Ranks(comm, **({} if how is None else how))
    opt = train(parameters(SHAPES), ao.LAMB(lr=0.1), [gradients(k, SHAPES) for k in range(n)], there, **options)
    before, grads = contents(opt), gradients(n, SHAPES)
    bad(comm.rank, grads)
    return opt, before, grads


def own(rank, grads):
    """Gradients of each rank's own batch, but for one tensor."""
    grads["w"] += np.float32(rank)
    grads["b"][3] += np.float32(1e-7) * (rank == 2)


GRADIENTS = [
    ({}, {}),
    ({}, {"accumulate": 1, "clip_norm": 1.0}),
    ({}, {"loss_scale": 8.0}),
    ({"check": 1}, {"engine": "array_api"}),
]


@pytest.mark.parametrize(("how", "options"), GRADIENTS)
def test_gradients_that_were_not_reduced(how, options):
    def rank(comm):
        opt, before, grads = steps(comm, own, n=0, how=how, **options)
        said = refused(lambda: opt.step(grads))
        found = differing(before, contents(opt))
        opt.step(gradients(0, SHAPES))
        return said, found, opt.step_count

    every = ao.ranks.run(3, rank)
    assert {x[1:] for x in [(said, tuple(found), count) for said, found, count in every]} == {((), 1)}
    (said,) = {x[0] for x in every}
    assert said.startswith("ValueError: Optimizer.step: nothing was changed, for the ranks do not agree: ")
    assert "the gradient of 'w' differs between ranks 1, 2 and rank 0; " in said
    assert "the gradient of 'b' differs between rank 2 and rank 0; " in said
    assert "'s'" not in said
    assert "Ranks(comm, grads='mean')" in said


@pytest.mark.parametrize("done", range(3))
def test_each_micro_step_is_compared(done):
    def rank(comm):
        opt = ao.Optimizer(parameters(SHAPES), ao.SGD(lr=0.1), comm=comm, accumulate=3)
        for k in range(done):
            opt.step(gradients(k, SHAPES))
        grads = gradients(done, SHAPES)
        own(comm.rank, grads)
        said = refused(lambda: opt.step(grads))
        for k in range(done, 3):
            opt.step(gradients(k, SHAPES))
        return said, {n: x.tobytes() for n, x in opt.params.items()}

    one = ao.Optimizer(parameters(SHAPES), ao.SGD(lr=0.1), accumulate=3)
    for k in range(3):
        one.step(gradients(k, SHAPES))
    for said, params in ao.ranks.run(2, rank):
        assert "the gradient of 'w' differs between rank 1 and rank 0" in said
        assert params == {n: x.tobytes() for n, x in one.params.items()}


@pytest.mark.parametrize(
    ("check", "noticed"),
    [(100, [0]), (True, [0]), (2, [0, 2, 4]), (1, [0, 1, 2, 3, 4]), (0, []), (None, []), (False, [])],
)
def test_which_steps_compare(check, noticed):
    def rank(comm):
        opt = ao.Optimizer({"x": np.zeros(3)}, ao.SGD(lr=0.1), comm=ao.Ranks(comm, check=check))
        found = []
        for k in range(5):
            try:
                opt.step({"x": np.full(3, float(comm.rank))})
            except ValueError:
                found.append(k)
                opt.step({"x": np.ones(3)})
        return found

    assert ao.ranks.run(2, rank) == [noticed] * 2


@pytest.mark.parametrize("check", [-1, 1.5, "often"])
def test_what_is_no_number_of_steps(check):
    (one,) = ao.ranks.threads(1)
    with pytest.raises((TypeError, ValueError), match=re.escape("Ranks: `check` must be an integer from 0, True")):
        ao.Ranks(one, check=check)


PLACES_OF_ALL = [(engine, library) for engine, row in ENGINES.items() for library in BACKENDS if takes(row, library)]


@pytest.mark.parametrize(("engine", "library"), PLACES_OF_ALL)
def test_on_every_engine_and_library(engine, library):
    """The same bytes pass, and one element that is another does not; the first step alone is compared."""
    asarray = BACKENDS[library].array

    def rank(comm):
        opt = ao.Optimizer({"x": asarray(np.ones(7))}, ao.SGD(lr=0.1), comm=comm, engine=engine)
        g = np.arange(7.0)
        g[2] += comm.rank
        said = refused(lambda: opt.step({"x": asarray(g)}))
        opt.step({"x": asarray(np.ones(7))})
        return said, opt.step_count

    for said, count in ao.ranks.run(2, rank):
        assert "the gradient of 'x' differs between rank 1 and rank 0" in said
        assert count == 1


@each_compiled
def test_parts_that_several_ranks_have(engine):
    """Those of one place are compared with each other, and with no others; with gradients of their own, too."""

    def rank(comm):
        pair = comm.rank // 2
        part = ao.Part(np.ones((2, 3)), (2 * pair, 0), (4, 3))
        there = ao.Ranks(comm, grads="mean")
        opt = ao.Optimizer({"w": part, "v": np.ones(3)}, ao.SGD(lr=0.1), comm=there, engine=engine)
        v = np.full(3, float(comm.rank))
        said = refused(lambda: opt.step({"w": np.full((2, 3), float(comm.rank == 3)), "v": v}))
        opt.step({"w": np.full((2, 3), float(pair)), "v": v})
        return said, opt.params["v"].tolist()

    for said, v in ao.ranks.run(4, rank):
        assert said.count("the gradient of ") == 1
        assert "the gradient of 'w' differs between rank 3 and rank 2" in said
        assert v == [1 - 0.1 * 1.5] * 3


def test_an_error_says_of_some_tensors_what_differs():
    def rank(comm):
        opt = ao.Optimizer([np.zeros(2) for _ in range(30)], ao.SGD(lr=0.1), comm=comm)
        return refused(lambda: opt.step([np.full(2, float(comm.rank)) for _ in range(30)]))

    (said,) = set(ao.ranks.run(2, rank))
    assert said.count("differs between") == 8
    assert "and 22 more" in said


# ---- what is not finite ---------------------------------------------------------------------------------------------


SEEN = [{"skip_nonfinite": True}, {"loss_scale": ao.LossScale(init=8.0)}, {"skip_nonfinite": True, "clip_norm": 1.0}]


@pytest.mark.parametrize("options", SEEN, ids=["skip", "scale", "clip"])
@each_engine
def test_what_is_not_finite_on_one_rank_counts_on_all(engine, options):
    """Wherever it is: in what this rank updates, or others."""
    shapes = {"long": (30_000,), "w": (30, 70), "b": (5,)}

    def rank(comm):
        there = ao.Ranks(comm, check=None)
        opt = train(parameters(shapes), ao.LAMB(lr=0.1), [gradients(0, shapes)], there, engine=engine, **options)
        before, found = {n: x.tobytes() for n, x in opt.params.items()}, []
        for k, (name, at) in enumerate([("long", 3), ("long", -3), ("w", 0), ("b", 4)]):
            grads = gradients(k, shapes)
            grads[name].reshape(-1)[at] = (np.nan, np.inf)[k % 2] if comm.rank == k % 3 else 0.1
            opt.step(grads)
            found.append((opt.stats.skipped, opt.nonfinite()))
        return found, {n: x.tobytes() for n, x in opt.params.items()} == before, opt.loss_scale

    scale = 8.0 / 2**3 if "loss_scale" in options else 1.0
    expected = [(1, ["long"]), (2, ["long"]), (3, ["w"]), (4, ["b"])], True, scale
    assert ao.ranks.run(3, rank) == [expected] * 3


def test_layers_that_are_not_finite_on_one_rank():
    def rank(comm):
        opt = ao.Optimizer(
            {"w": np.ones((3, 4)), "v": np.ones((2, 4))},
            ao.SGD(lr=0.1, stacked=True),
            comm=ao.Ranks(comm, check=0),
            skip_nonfinite=True,
        )
        for name in ("w", "v"):
            grads = {"w": np.ones((3, 4)), "v": np.ones((2, 4))}
            grads[name][1, 2] = np.nan if comm.rank else 0.0
            opt.step(grads)
        return {name: skipped.tolist() for name, skipped in opt.skipped_layers().items()}

    assert ao.ranks.run(2, rank) == [{"w": [0, 1, 0], "v": [0, 1]}] * 2


@pytest.mark.parametrize("stacked", [True, False])
def test_norms_have_one_order_on_all_ranks(stacked):
    """Ranks that have nothing have one bucket, in the order of its groups; others have several."""

    def rank(comm=None):
        params, grads = ({n: np.ones((4, 30)) for n in "abcde"} for _ in range(2))
        grads["d"][1, 3] = np.nan
        groups = {"d": {"lr": 0.2}, "b": {"lr": 0.3}}
        opt = ao.Optimizer(params, ao.SGD(lr=0.1, stacked=stacked), groups=groups, skip_nonfinite=True, comm=comm)
        opt.step(grads)
        return opt.nonfinite(), opt.stats.global_norm, contents(opt)

    one = repr(rank())
    assert [repr(x) == one for x in ao.ranks.run(6, rank)] == [True] * 6


def test_the_sums_of_micro_steps_are_looked_at():
    def rank(comm):
        there = ao.Ranks(comm, check=0)
        opt = ao.Optimizer(
            {"a": np.ones(3), "b": np.ones(3)}, ao.SGD(lr=1.0), comm=there, accumulate=2, skip_nonfinite=True
        )
        for k in range(2):
            opt.step({n: np.full(3, np.nan if (k, comm.rank) == (0, 1) else 1.0) for n in "ab"})
        return opt.stats.skipped, opt.params["a"].tolist(), opt.params["b"].tolist()

    assert ao.ranks.run(2, rank) == [(1, [1.0] * 3, [1.0] * 3)] * 2


# ---- parameters that users replace ----------------------------------------------------------------------------------


def put_all(opt, rank):
    opt.params = {n: x + np.float32(1) if rank == 1 else x for n, x in opt.params.items()}


def put_one(opt, rank):
    if rank == 1:
        opt.params["w"] = opt.params["w"] * np.float32(2)


def put_the_same(opt, rank):
    if rank == 1:
        opt.params["w"] = opt.params["w"].copy()


def put_others(opt, rank):
    opt.params["w"] = opt.params["w"] + np.float32(rank)


CALLS = {
    "step": lambda opt, path: opt.step(gradients(9, SHAPES)),
    "save": lambda opt, path: opt.save(path),
    "state_dict": lambda opt, path: opt.state_dict(),
    "averaged": lambda opt, path: opt.averaged(),
    "advance": lambda opt, path: opt.advance(),
}
REPLACED = [
    (put_all, "'w' was replaced on rank 1 alone; 'b' was replaced on rank 1 alone"),
    (put_one, "'w' was replaced on rank 1 alone"),
    (put_the_same, "'w' was replaced on rank 1 alone"),
    (put_others, "'w' was replaced by other values on ranks 1, 2 than on rank 0"),
]


@pytest.mark.parametrize(("change", "words"), REPLACED)
@pytest.mark.parametrize("call", CALLS)
def test_what_one_rank_replaces(change, words, call, tmp_path):
    """All ranks say so, and go on where the old arrays are back, or all have the same new ones."""
    good = [gradients(k, SHAPES) for k in range(2)]
    one = train(parameters(SHAPES), ao.LAMB(lr=0.1), good, engine="numpy")
    one.params = {n: x * np.float32(3) for n, x in one.params.items()}
    one.step(good[0])
    expected = contents(one)

    def rank(comm):
        opt = train(parameters(SHAPES), ao.LAMB(lr=0.1), good[:1], comm, engine="numpy")
        old = dict(opt.params)
        for _ in range(2):
            change(opt, comm.rank)
            said = [refused(lambda: CALLS[call](opt, tmp_path / "x")) for _ in range(2)]
            assert all(words in x and "nothing was changed" in x for x in said), said
            opt.params = dict(old)
        opt.step(good[1])
        opt.params = {n: x * np.float32(3) for n, x in opt.params.items()}
        opt.step(good[0])
        return differing(expected, contents(opt))

    assert ao.ranks.run(3, rank) == [[]] * 3
    assert not (tmp_path / "x").exists()


@each_compiled
def test_a_master_is_what_it_was_once_the_old_array_is_back(engine):
    """The bits that a parameter of 16 does not have are not lost by a call that fails."""
    rule, dtype = ao.LAMB(lr=0.01, master_weights=True), ml_dtypes.bfloat16
    good = [gradients(k, SHAPES, dtype) for k in range(3)]
    expected = contents(train(parameters(SHAPES, dtype), rule, good, engine=engine))

    def rank(comm):
        opt = train(parameters(SHAPES, dtype), rule, good[:2], comm, engine=engine)
        old = opt.params["w"]
        opt.params["w"] = old.copy() if comm.rank == 0 else old
        refused(lambda: opt.step(good[2]))
        opt.params["w"] = old
        opt.step(good[2])
        return differing(expected, contents(opt))

    assert ao.ranks.run(3, rank) == [[]] * 3


@each_compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_one_rank_writes_into(engine, dtype):
    """PyTorch counts writes; those of NumPy are seen in steps that compare."""

    def rank(comm):
        x = torch.ones(40, dtype=dtype)
        there = ao.Ranks(comm, check=None)
        opt = ao.Optimizer({"x": x}, ao.SGD(lr=0.5), comm=there, engine=engine)
        opt.step({"x": torch.ones(40, dtype=dtype)})
        if comm.rank:
            x.mul_(3)
        said = refused(lambda: opt.step({"x": torch.ones(40, dtype=dtype)}))
        x.copy_(torch.full((40,), 1.5))
        opt.step({"x": torch.ones(40, dtype=dtype)})
        return said, x.tolist()

    for said, x in ao.ranks.run(2, rank):
        assert "'x' has other values on rank 1 than on rank 0" in said
        assert x == [1.0] * 40

    def plain(comm):
        x = np.ones(40)
        opt = ao.Optimizer({"x": x}, ao.SGD(lr=0.5), comm=comm)
        x[3] = comm.rank  # as weights that are loaded on one rank alone
        said = refused(lambda: opt.step({"x": np.ones(40)}))
        x[3] = 1.0
        return said, opt.step({"x": np.ones(40)})["x"].tolist()

    for said, x in ao.ranks.run(2, plain):
        assert "'x' has other values on rank 1 than on rank 0" in said
        assert x == [0.5] * 40


def test_a_load_ends_the_difference(tmp_path):
    def rank(comm):
        opt = train(parameters(SHAPES), ao.LAMB(lr=0.1), [gradients(0, SHAPES)], comm, engine="numpy")
        opt.save(tmp_path / "x")
        put_one(opt, comm.rank)
        refused(lambda: opt.step(gradients(1, SHAPES)))
        opt.load(tmp_path / "x")
        opt.step(gradients(1, SHAPES))
        return contents(opt)

    expected = contents(
        train(parameters(SHAPES), ao.LAMB(lr=0.1), [gradients(k, SHAPES) for k in range(2)], engine="numpy")
    )
    assert [differing(expected, x) for x in ao.ranks.run(2, rank)] == [[]] * 2


# ---- hooks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("all_have_one", [True, False])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_hook_that_fails_after_a_step(all_have_one, accumulate):
    """In the same call; the step is made on all ranks, and they go on. The same error may come once more."""
    same = ValueError("the disk is full")
    grads = [gradients(k, SHAPES) for k in range(3) for _ in range(accumulate)]
    expected = contents(train(parameters(SHAPES), ao.LAMB(lr=0.1), grads, accumulate=accumulate))

    def rank(comm):
        def hook(opt):
            if comm.rank == 1 and opt.step_count < 3:
                raise same

        opt = ao.Optimizer(parameters(SHAPES), ao.LAMB(lr=0.1), comm=ao.Ranks(comm, timeout=20), accumulate=accumulate)
        if all_have_one or comm.rank == 1:
            opt.after_step(hook)
        said = []
        for k, g in enumerate(grads):
            if (k + 1) % accumulate == 0 and k < 2 * accumulate:
                said.append(refused(partial(opt.step, g)))
            else:
                opt.step(g)
        return said, differing(expected, contents(opt))

    every = ao.ranks.run(3, rank)
    assert [x[1] for x in every] == [[]] * 3
    assert every[1][0] == ["ValueError: the disk is full"] * 2
    words = "RankError: Optimizer.step: the step was made, but rank 1 failed in a hook after it: ValueError: the disk"
    assert all(x.startswith(words) for r in (0, 2) for x in every[r][0]), every[0][0]


def test_hooks_that_fail_within_calls_of_all_ranks(tmp_path):
    """Others are in a call of their own hooks then, which ends."""

    def rank(comm):
        def hook(opt):
            assert comm.rank != 1, "not here"
            opt.save(tmp_path / "x")

        opt = ao.Optimizer(parameters(SHAPES), ao.SGD(lr=0.1), comm=ao.Ranks(comm, timeout=20))
        remove = opt.after_step(hook)
        with pytest.raises((AssertionError, ao.RankError), match="not here"):
            opt.step(gradients(0, SHAPES))
        remove()
        opt.step(gradients(1, SHAPES))
        return opt.step_count

    assert ao.ranks.run(3, rank) == [2] * 3


@pytest.mark.parametrize("hooks", [(), (0,), (1,), (0, 1)])
def test_who_asked_for_reports_fails_on_one_rank(hooks):
    def rank(comm):
        def receive(reports):
            raise ValueError("the disk is full")

        opt = ao.Optimizer(parameters(SHAPES), ao.SGD(lr=0.1), comm=ao.Ranks(comm, timeout=20))
        if comm.rank in hooks:
            opt.after_step(lambda opt: None)
        if comm.rank == 1:
            opt.stats.request(receive)
        said = refused(partial(opt.step, gradients(0, SHAPES)))
        opt.step(gradients(1, SHAPES))
        return said, opt.step_count

    every = ao.ranks.run(2, rank)
    assert every[1] == ("ValueError: the disk is full", 2)
    assert "the step was made, but rank 1 failed in a hook after it: ValueError: the disk is full" in every[0][0]
    assert every[0][1] == 2


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_is_raised_between_a_step_and_its_hooks(accumulate):
    """As by the handler of a signal that has waited for the step to be written."""

    def rank(comm):
        opt = ao.Optimizer(parameters(SHAPES), ao.SGD(lr=0.1), comm=ao.Ranks(comm, timeout=20), accumulate=accumulate)
        if comm.rank == 0:
            opt.after_step(lambda opt: None)
        make = opt._step.make

        def late(*args, **options):
            if make(*args, **options) and comm.rank == 1 and opt.step_count == 1:
                raise ValueError("a signal")
            return opt._step.accumulator.done == 0

        opt._step.make = late
        for _ in range(accumulate - 1):
            opt.step(gradients(0, SHAPES))
        said = refused(partial(opt.step, gradients(0, SHAPES)))
        for _ in range(accumulate):
            opt.step(gradients(1, SHAPES))
        return said, opt.step_count

    every = ao.ranks.run(2, rank)
    assert every[1] == ("ValueError: a signal", 2)
    assert "the step was made, but rank 1 failed in a hook after it: ValueError: a signal" in every[0][0]


@pytest.mark.parametrize("when", ["before_step", "after_step"])
@pytest.mark.parametrize("path", [3, "no/such/folder/x"])
def test_calls_of_all_ranks_that_fail_within_hooks(when, path, tmp_path):
    """All know of the error then: it is not told once more, to ranks that are elsewhere."""

    def rank(comm):
        opt = ao.Optimizer(parameters(SHAPES), ao.SGD(lr=0.1), comm=ao.Ranks(comm, timeout=20))
        remove = getattr(opt, when)(lambda opt, *_: opt.save(tmp_path / "x" if comm.rank else path))
        with pytest.raises((OSError, TypeError, ao.RankError)) as error:
            opt.step(gradients(0, SHAPES))
        remove()
        for k in range(2):
            opt.step(gradients(k, SHAPES))
        return str(error.value), opt.step_count

    every = ao.ranks.run(3, rank)
    assert [count for _, count in every] == [2 + (when == "after_step")] * 3
    assert all("rank 0 failed" in said and every[0][0] in said for said, _ in every[1:])


@pytest.mark.parametrize("options", [{"clip_norm": 1.0}, {"skip_nonfinite": True}, {"loss_scale": 2.0}])
def test_steps_without_any_gradient(options):
    def rank(comm):
        opt = ao.Optimizer(parameters(SHAPES), ao.SGD(lr=0.1), comm=comm, **options)
        opt.step(dict.fromkeys(SHAPES))
        return {n: x.tobytes() for n, x in opt.params.items()}

    before = {n: x.tobytes() for n, x in parameters(SHAPES).items()}
    assert ao.ranks.run(3, rank) == [before] * 3

"""All ranks, or none: what they must agree on, and what becomes of errors, of ranks that end or do not come."""

import re
import threading
import time

import numpy as np
import pytest
import torch

import arrayopt as ao
from arrayopt.engines import registry
from tests.support.engines import STAND_IN, each_compiled, each_engine
from tests.support.ranks import contents, differing, gradients, left_by, parameters, train


def errors_of(f, ranks=3):
    """What each rank raised, as text; and what it returned."""

    def rank(comm):
        try:
            return f(comm)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    return ao.ranks.run(ranks, rank)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r, p, o: p.pop("bias") if r == 1 else None, "'bias' is float32 (64,) in group 'all' on rank 0"),
        (
            lambda r, p, o: p.update(bias=p["bias"].astype("f8")) if r == 1 else None,
            "float64 (64,) in group 'all' on rank 1",
        ),
        (lambda r, p, o: p.update(bias=p["bias"] + 1) if r == 2 else None, "the checksum of 'bias' is"),
        (lambda r, p, o: o.update(rule=ao.LAMB(lr=0.1 * (r + 1))), "the rule of group 'all' is LAMB(lr=0.1"),
        (lambda r, p, o: o.update(clip_norm=1.0 + r), "`clip_norm` is 1.0 on rank 0, 2.0 on rank 1, 3.0 on rank 2"),
        (
            lambda r, p, o: o.update(engine=["numpy", STAND_IN, "numpy"][r]),
            f"`engine` is numpy on rank 0, {STAND_IN} on rank 1",
        ),
    ],
)
def test_what_must_agree_is_compared_at_the_start(change, words):
    def make(comm):
        params, options = parameters(), {"rule": ao.LAMB(lr=0.1), "engine": "numpy"}
        change(comm.rank, params, options)
        ao.Optimizer(params, comm=comm, **options)

    found = errors_of(make)
    assert len(set(found)) == 1
    assert found[0].startswith("ValueError: Optimizer: nothing was changed, for the ranks do not agree: ")
    assert words in found[0]


def test_engines_that_cut_tensors_elsewhere():
    """As where one rank has arrays of another library, or lacks what an engine needs."""

    def rank(comm):
        x = np.ones(100_001, np.float32)
        params = {"long": x if comm.rank else torch.from_numpy(x)}
        return ao.Optimizer(params, ao.AdamW(), comm=comm, engine="auto").explain()

    fused = {"torch": (STAND_IN,), "numpy": ()}
    with pytest.MonkeyPatch.context() as m:
        for library, engines in fused.items():
            m.setitem(registry.FUSED, library, engines)
        with pytest.raises(ValueError, match=r"where 'long' is cut for its engine is .* on rank 0, .* on rank 1"):
            ao.ranks.run(2, rank)


def test_schedules_of_one_s_own_agree():
    found = ao.ranks.run(
        2, lambda comm: train(parameters(), ao.SGD(lr=lambda step: 0.1), [gradients(0)], comm).step_count
    )
    assert found == [1, 1]


def test_an_error_of_one_rank_is_one_of_all():
    found = errors_of(lambda comm: ao.Optimizer(parameters(), ao.SGD(lr=0.1), accumulate=comm.rank, comm=comm))
    assert found[0] == "ValueError: Optimizer: `accumulate` must be at least 1; got 0"
    assert found[1] == found[2] == f"RankError: Optimizer: nothing was changed, for rank 0 failed: {found[0]}"


WRONG_STEPS = {
    "a shape": (lambda g: g.update(bias=np.zeros(3, np.float32)), "rank 1 failed: ValueError: Optimizer.step"),
    "a gradient that is not there": (
        lambda g: g.update(bias=None),
        "without a gradient is [] on rank 0, ['bias'] on rank 1",
    ),
    "a dtype": (lambda g: g.update(bias=g["bias"].astype("f8")), "dtypes of gradients"),
}


@each_compiled
@pytest.mark.parametrize("label", WRONG_STEPS)
@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}, {"accumulate": 2}, {"stats": True}])
def test_a_step_that_one_rank_cannot_make_changes_nothing(engine, label, options):
    change, words = WRONG_STEPS[label]
    good = [gradients(k) for k in range(2)]
    expected = contents(train(parameters(), ao.LAMB(lr=0.1), good, engine=engine, **options))

    def steps(comm):
        opt = ao.Optimizer(parameters(), ao.LAMB(lr=0.1), engine=engine, comm=comm, **options)
        opt.step(good[0])
        wrong = gradients(1)
        if comm.rank == 1:
            change(wrong)
        with pytest.raises((ValueError, ao.RankError)) as caught:
            opt.step(wrong)
        opt.step(good[1])
        return str(caught.value), differing(expected, contents(opt))

    found = ao.ranks.run(3, steps)
    assert [differs for _, differs in found] == [[]] * 3
    assert words in found[0][0]


def test_hooks_and_hyper_parameters():
    def steps(comm):
        def hook(opt, grads):
            assert comm.rank != 1, "not today"

        opt = ao.Optimizer(parameters(), ao.SGD(lr=0.1), comm=comm)
        remove = opt.before_step(hook)
        with pytest.raises((AssertionError, ao.RankError)) as caught:
            opt.step(gradients(0))
        remove()
        opt.lr = 0.1 + comm.rank
        with pytest.raises(ValueError, match=re.escape("`lr` of group 'all' is 0.1 on rank 0, 1.1 on rank 1")):
            opt.step(gradients(0))
        return str(caught.value), opt.step_count, bool((opt.params["bias"] == parameters()["bias"]).all())

    found = ao.ranks.run(3, steps)
    assert [x[1:] for x in found] == [(0, True)] * 3
    assert "rank 1 failed: AssertionError: not today" in found[2][0]


def test_different_calls_are_told_apart():
    def call(comm):
        opt = ao.Optimizer(parameters(), ao.SGD(lr=0.1), comm=comm)
        (opt.state_dict if comm.rank else lambda: opt.step(gradients(0)))()

    found = errors_of(call, 2)
    words = "nothing was changed, for the ranks do not agree: rank 0 is in Optimizer.step;"
    for what, said in zip(("step", "state_dict"), found, strict=True):
        assert said == f"ValueError: Optimizer.{what}: {words} rank 1 is in Optimizer.state_dict"


def test_optimizers_over_one_communicator_are_told_apart():
    """Ranks that called two of equal shapes in another order added the gradients of one to those of the other."""

    def step(comm):
        there = ao.Ranks(comm, grads="mean", timeout=20)
        both = [ao.Optimizer({"w": np.zeros(4)}, ao.SGD(lr=1.0), comm=there) for _ in range(2)]
        both[comm.rank].step({"w": np.ones(4)})

    for error in errors_of(step, ranks=2):
        assert "which Optimizer over the communicator is 1 on rank 0, 2 on rank 1" in str(error)


def test_a_rank_that_does_not_come():
    def late(comm):
        opt = ao.Optimizer(parameters(), ao.SGD(lr=0.1), comm=ao.Ranks(comm, timeout=0.5))
        if comm.rank == 0:
            time.sleep(1.5)
            return "slept"
        began = time.monotonic()
        with pytest.raises(ao.RankError, match=re.escape("did not answer within 0.5 s")):
            opt.step(gradients(0))
        return time.monotonic() - began < 1.4, opt.step_count

    assert ao.ranks.run(2, late) == ["slept", (True, 0)]


@each_compiled
def test_ranks_torn_apart_refuse_to_go_on_until_they_load(engine, tmp_path, monkeypatch):
    every = [gradients(k) for k in range(4)]
    expected = contents(train(parameters(), ao.LAMB(lr=0.1), every, engine=engine))
    meeting = threading.Barrier(2)

    def rank(comm):
        opt = train(parameters(), ao.LAMB(lr=0.1), every[:2], ao.Ranks(comm, timeout=5.0), engine=engine)
        opt.save(tmp_path / "x")
        if comm.rank == 1:
            opt._team.gather = lambda tensors, **_: 1 / 0  # in the middle of a step, after the first write
        with pytest.raises((ao.RankError, ZeroDivisionError)):
            opt.step(every[2])
        words = []
        for call in (lambda: opt.step(every[2]), lambda: opt.save(tmp_path / "y"), opt.state_dict):
            with pytest.raises(ao.RankError, match="load a checkpoint") as caught:
                call()
            words.append(str(caught.value))
        if comm.rank == 1:
            del opt._team.gather
        meeting.wait(10)
        opt.load(tmp_path / "x")
        for grads in every[2:]:
            opt.step(grads)
        return words[0], differing(expected, contents(opt))

    found = ao.ranks.run(2, rank)
    assert [differs for _, differs in found] == [[], []]
    assert "rank 1 broke off Optimizer.step (ZeroDivisionError" in found[1][0]
    assert not (tmp_path / "y").exists()


def test_what_is_no_communicator():
    for comm in (3, "mpi", object()):
        words = r": `comm` must be a communicator of mpi4py"
        with pytest.raises(TypeError, match="^Optimizer" + words):
            ao.Optimizer(parameters(), ao.SGD(lr=0.1), comm=comm)
        with pytest.raises(TypeError, match="^minimize" + words):
            ao.minimize(lambda x: (float(x @ x), 2 * x), np.ones(2), comm=comm)
        with pytest.raises(TypeError, match="^Ranks" + words):
            ao.Ranks(comm)
    (one,) = ao.ranks.threads(1)
    for name, x in {"grads": "own", "gather": "x", "reduction": "quick", "timeout": 0}.items():
        with pytest.raises(ValueError, match=f"`{name}`"):
            ao.Ranks(one, **{name: x})
    for n, error in ((0, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match=r"ranks\.threads"):
            ao.ranks.threads(n)


def test_run_raises_what_a_rank_raised():
    def rank(comm):
        if comm.rank == 2:
            raise KeyError("mine")
        ao.Optimizer(parameters(), ao.SGD(lr=0.1), comm=comm)

    with pytest.raises(KeyError, match="mine"):
        ao.ranks.run(3, rank)


@pytest.mark.parametrize("reduction", ["ordered", "fast"])
@each_engine
def test_who_is_let_go_is_free_at_once(engine, reduction):
    """What waits for the garbage collector keeps memory, and a process group when its process is about to end."""
    shapes = {"w": (300, 400), "b": (130,)}

    def rank(comm):
        there = ao.Ranks(comm, grads="mean", reduction=reduction)
        train(parameters(shapes), ao.LAMB(lr=0.01), [gradients(0, shapes)], there, engine=engine, clip_norm=1.0)

    assert left_by(lambda: ao.ranks.run(2, rank)) == set()


CALLS = {
    "Optimizer.step": lambda opt: opt.step({"w": np.ones(600)}),
    "Optimizer.give": lambda opt: (opt.give("w", np.ones(600)), opt.step()),
    "Optimizer.load": lambda opt: opt.load_state_dict({}),
}


@pytest.mark.parametrize("calls", [("Optimizer.step", "Optimizer.give"), ("Optimizer.load", "Optimizer.step")])
def test_errors_of_ranks_name_the_call_that_each_was_in(calls):
    def train(comm):
        opt = ao.Optimizer({"w": np.ones(600)}, ao.AdamW(), comm=ao.Ranks(comm, grads="mean", timeout=0.5))
        CALLS[calls[comm.rank]](opt)

    with pytest.raises(ao.RankError) as caught:
        ao.ranks.run(2, train)
    said = [str(caught.value), *caught.value.__notes__]
    assert said[0].startswith(f"{calls[0]}: ")
    assert said[1].startswith(f"rank 1: RankError: {calls[1]}: ")

"""Messages that take any time, and ranks that fail at any call: the bits of one process, or an error of all."""

import contextlib
import random
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import arrayopt as ao
from arrayopt.ranks import gather, layout
from benchmarks.late import late
from tests.support.engines import EVERY
from tests.support.entered import Fault, Raising
from tests.support.ranks import contents, differing, gradients, parameters
from tests.support.slow import marked, settled

SHAPES = {"words": (300, 64), "bias": (64,), "scalar": (), "empty": (0, 7), "square": (128, 128), "long": (10_001,)}
RULES = {"LAMB": ao.LAMB(lr=0.01), "CAME": ao.CAME(lr=0.01), "AdamW": ao.AdamW(lr=ao.schedules.Cosine(0.01, 10))}
OPTIONS = [{}, {"clip_norm": 0.5}, {"loss_scale": ao.LossScale(init=8.0)}, {"accumulate": 2, "clip_norm": 0.5}]


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch):
    monkeypatch.setattr(layout, "ROUND", 1 << 14)
    monkeypatch.setattr(layout, "FOR_EACH", 1 << 10)
    monkeypatch.setattr(layout, "GROUPS", 1.5)  # groups of buckets, also with two ranks
    monkeypatch.setattr(gather, "ROUND", 1 << 14)
    monkeypatch.setattr(gather, "LARGE", 1 << 10)


@contextlib.contextmanager
def delays(seed):
    """Messages that arrive after 0 to 2 ms, and some after 20."""
    rng, home = random.Random(seed), sys.modules["arrayopt.ranks.threads"]
    kind = home.ThreadComm
    home.ThreadComm = late(kind, lambda size: 0.02 if rng.random() < 0.02 else 0.002 * rng.random())
    try:
        yield
    finally:
        home.ThreadComm = kind


def mean(every):
    """The mean of the ranks' gradients, added in their order."""
    found = {}
    for name, g in every[0].items():
        total = g
        for other in every[1:]:
            total = None if total is None else np.asarray(total + other[name])
        found[name] = None if total is None else np.asarray(total / np.float32(len(every)))
    return found


@settled(16)
@given(
    engine=st.sampled_from(EVERY),
    name=st.sampled_from(sorted(RULES)),
    options=st.sampled_from(OPTIONS),
    reduction=st.sampled_from(["ordered", "fast"]),
    ranks=st.integers(2, 4),
    seed=st.integers(0, 2**20),
)
def test_messages_of_any_duration(engine, name, options, reduction, ranks, seed):
    """Given in any order, with buckets, absent gradients and accumulation, and waited for in any order."""
    ranks = 2 if reduction == "fast" else ranks  # of more numbers the order matters
    steps, every = 4, options.get("accumulate", 1)
    rng = np.random.default_rng(seed)
    absent = [[name for name in SHAPES if name != "bias" and rng.random() < 0.2] for _ in range(steps)]
    grads = [[gradients(k, SHAPES, seed=r, without=absent[k]) for r in range(ranks)] for k in range(steps)]

    def at_once(comm, own):
        there = None if comm is None else ao.Ranks(comm, grads="mean")
        opt = ao.Optimizer(parameters(SHAPES), RULES[name], comm=there, engine=engine, **options)
        for found in own:
            opt.step(found)
        return contents(opt)

    if every == 1:
        one = at_once(None, [mean(found) for found in grads])
    else:  # the mean of the ranks' means, which all ranks make together without delays
        one = ao.ranks.run(ranks, lambda comm: at_once(comm, [found[comm.rank] for found in grads]))[0]

    def rank(comm):
        rng = np.random.default_rng([seed, comm.rank])
        there = ao.Ranks(comm, grads="mean", reduction=reduction)
        opt = ao.Optimizer(parameters(SHAPES), RULES[name], comm=there, engine=engine, **options)
        for k in range(steps):
            names = [name for name in SHAPES if grads[k][comm.rank][name] is not None]
            rng.shuffle(names)
            for given_now in names:
                time.sleep(0.002 * rng.random())
                opt.give(given_now, grads[k][comm.rank][given_now])
            opt.step(wait=False)
            for wanted in rng.choice(list(SHAPES), rng.integers(0, 4)):
                opt.wait(str(wanted))
        return contents(opt)

    with delays(seed):
        found = ao.ranks.run(ranks, rank)
    for many in found:
        assert differing(one, many) == []


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("samples", marked([(7,), (200,)], lambda samples: samples == 7))
def test_a_failure_at_any_call_of_give_is_an_error_of_all_or_of_nobody(samples, which, tmp_path):
    """The last rank fails somewhere in the first or the second `give` of its second step; then all make the step again,
    after a load if they must.
    """
    grads = [[gradients(k, SHAPES, seed=r) for r in range(2)] for k in range(2)]
    one = ao.Optimizer(parameters(SHAPES), ao.LAMB(lr=0.01))
    for every in grads:
        one.step(mean(every))
    expected, names = contents(one), list(SHAPES)[::-1]

    def begun(comm):
        opt = ao.Optimizer(parameters(SHAPES), ao.LAMB(lr=0.01), comm=ao.Ranks(comm, grads="mean", timeout=20))
        for name in names:
            opt.give(name, grads[0][comm.rank][name])
        opt.step()
        return opt

    def count(comm):
        opt, calls = begun(comm), None
        for name in names:
            with Raising() if name == names[which] else contextlib.nullcontext() as counted:
                opt.give(name, grads[1][comm.rank][name])
            calls = counted or calls
        opt.step()
        assert differing(expected, contents(opt)) == []
        return calls.count

    calls = max(ao.ranks.run(2, count))
    ways = set()
    spaced = np.geomspace if samples == 7 else np.linspace  # the first calls check, and most of the others send
    for at in np.unique(spaced(1, calls, samples).astype(int) - 1).tolist():

        def rank(comm, at=at):
            opt, failed = begun(comm), ""
            opt.save(tmp_path / "before")
            before = {name: x.copy() for name, x in opt.params.items()}
            try:
                for name in names:
                    fails = comm.rank and name == names[which]
                    with Raising(at) if fails else contextlib.nullcontext(), contextlib.suppress(Fault):
                        opt.give(name, grads[1][comm.rank][name])
                opt.step()
            except (ao.RankError, RuntimeError, ValueError) as error:
                failed = type(error).__name__
            if failed:
                for name, x in opt.params.items():
                    np.testing.assert_array_equal(x, before[name])
                if opt._team.torn is not None:
                    opt.load(tmp_path / "before")
                for name in names:
                    opt.give(name, grads[1][comm.rank][name])
                opt.step()
            assert differing(expected, contents(opt)) == []
            return failed, opt._team.torn

        first, second = ao.ranks.run(2, rank)
        assert bool(first[0]) == bool(second[0]), at
        ways.add((first[0], second[0]))
    assert (("RankError", "RuntimeError"), ("RankError", "RankError"))[which] in ways

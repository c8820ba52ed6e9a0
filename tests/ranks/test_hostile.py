"""What went wrong once when somebody tried to break ranks: each test is a way that was found."""

import time
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pytest
import torch

import arrayopt as ao
from tests.support.engines import each_compiled, each_engine
from tests.support.ranks import contents, differing, gradients, parameters, train


@dataclass(frozen=True, kw_only=True, repr=False)
class Scalars(ao.Rule):
    """A rule with a slot for each tensor, a scalar of NumPy's, and one with an element."""

    lr: ao.Hyper = ao.real("[0, inf)", 1e-2)

    def slots(self, xp, p):
        return {"r": 0 * xp.sum(p), "q": 0 * xp.sum(p, keepdims=True)}

    def update(self, xp, p, g, s, h):
        r, q = 0.9 * s["r"] + xp.sum(g * g), 0.5 * s["q"] + xp.sum(xp.abs(g), keepdims=True)
        return p - h.lr * g / (1.0 + xp.sqrt(r) + q), {"r": r, "q": q}


FLAT = {"a": (60_000,), "b": (60_000,)}


def caught(call):
    """What a call raised, as text, and the seconds that it took."""
    began = time.monotonic()
    with pytest.raises(Exception) as info:  # noqa: PT011 - the caller looks at it
        call()
    return f"{info.type.__name__}: {info.value}", time.monotonic() - began


@each_compiled
@pytest.mark.parametrize(("field", "value"), [("grad_centralization", True), ("clip_unit_ratio", 0.01)])
def test_a_field_that_is_switched_on_cannot_move_the_cuts(engine, field, value):
    """It was computed from elements of other rows, and written beside the arrays."""
    shapes = {"w": (300, 301), "v": (50_001,)}

    def rank(comm):
        opt = train(parameters(shapes), ao.LAMB(lr=0.1), [gradients(0, shapes)], comm, engine=engine)
        before = contents(opt)
        setattr(opt, field, value)
        with pytest.raises((ValueError, ao.RankError), match="was cut for other sums"):
            opt.step(gradients(1, shapes))
        setattr(opt, field, not value if value is True else None)
        found = differing(before, contents(opt))
        opt.step(gradients(1, shapes))
        return found

    assert ao.ranks.run(3, rank) == [[]] * 3


@each_compiled
def test_slots_that_are_scalars_of_numpy(engine):
    """Each step wrote them into memory that nobody had any more."""
    every = [gradients(k, FLAT) for k in range(3)]
    expected = contents(train(parameters(FLAT), Scalars(), every, engine=engine))
    found = ao.ranks.run(
        3, lambda comm: differing(expected, contents(train(parameters(FLAT), Scalars(), every, comm, engine=engine)))
    )
    assert found == [[]] * 3


def test_a_field_that_is_switched_on_over_parts():
    """Means are those of whole rows."""
    g = np.arange(16.0).reshape(4, 4) ** 2

    def rank(comm):
        part, own = ao.Part(np.ones((4, 2)), (0, 2 * comm.rank), (4, 4)), slice(2 * comm.rank, 2 * comm.rank + 2)
        opt = ao.Optimizer({"a": part}, ao.SGD(lr=1.0), comm=comm)
        opt.step({"a": g[:, own]})
        opt.grad_centralization = True
        opt.step({"a": g[:, own]})
        return part.array

    found = np.concatenate(ao.ranks.run(2, rank), axis=1)
    np.testing.assert_allclose(found, 1.0 - g - (g - g.mean(axis=1, keepdims=True)), rtol=1e-13)


def test_a_field_that_is_switched_on_one_rank():
    def rank(comm):
        opt = train(parameters(FLAT), ao.AdamW(lr=0.1), [gradients(0, FLAT)], comm)
        opt.nesterov = comm.rank == 1
        return caught(lambda: opt.step(gradients(1, FLAT)))[0]

    (said, _) = ao.ranks.run(2, rank)
    assert "`nesterov` of group 'all' is False on rank 0, True on rank 1" in said


@each_compiled
def test_masters_of_which_a_few_elements_are_written(engine):
    """Each rank looked only at its own elements, and one process at all of them."""

    def written(comm=None):
        opt = ao.Optimizer(parameters(FLAT, np.float16), ao.LAMB(lr=0.01), comm=comm, engine=engine)
        for k in range(3):
            opt.step(gradients(k, FLAT, np.float16))
        opt.params["b"] = opt.params["b"].copy()  # whereupon all are looked at
        opt.params["a"][7] = 3.0
        opt.step(gradients(3, FLAT, np.float16))
        return contents(opt)

    expected = written()
    assert ao.ranks.run(3, lambda comm: differing(expected, written(comm))) == [[]] * 3


@each_compiled
def test_a_parameter_that_becomes_another_before_the_first_step(engine):
    """The cuts are those of its first size."""

    def rank(comm):
        x = torch.ones(40_000)
        opt = ao.Optimizer({"x": x}, ao.LAMB(lr=0.1), comm=comm, engine=engine)
        x.data = torch.ones(90_000, dtype=torch.float64)
        with pytest.raises(ValueError, match="must keep shape, dtype, library and device"):
            opt.step({"x": torch.ones(90_000, dtype=torch.float64)})

    ao.ranks.run(2, rank)


def test_the_order_of_parameters_of_a_rank_in_the_middle():
    def rank(comm):
        names = ["b", "a"] if comm.rank == 1 else ["a", "b"]
        return caught(lambda: ao.Optimizer({x: np.ones(3) for x in names}, ao.SGD(lr=0.1), comm=comm))[0]

    assert all(x.endswith("the order of the parameters is not the same") for x in ao.ranks.run(3, rank))


@pytest.mark.parametrize("setting", [{"grads": "mean"}, {"gather": "packed"}, {"reduction": "fast"}])
def test_settings_that_differ(setting):
    def rank(comm):
        there = ao.Ranks(comm, **(setting if comm.rank else {}))
        return caught(lambda: ao.Optimizer(parameters(FLAT), ao.SGD(lr=0.1), comm=there))[0]

    ((name, value),) = setting.items()
    assert all(f"`{name}` is " in x and f"{value} on rank 1" in x for x in ao.ranks.run(2, rank))


def test_the_same_exception_twice():
    """The second time the others were not told, and waited for the time limit."""
    same = ValueError("same")

    def rank(comm):
        def hook(opt, grads):
            if comm.rank:
                raise same

        opt = ao.Optimizer({"a": np.ones(3)}, ao.SGD(lr=0.1), comm=comm)
        opt.before_step(hook)
        return [caught(lambda: opt.step({"a": np.ones(3)})) for _ in range(3)]

    for said, seconds in chain(*ao.ranks.run(2, rank)):
        assert "ValueError: same" in said
        assert seconds < 10


def test_sums_that_each_rank_would_take_for_its_own(tmp_path):
    """They were added up once for each rank."""
    opt = ao.Optimizer({"a": np.zeros(3)}, ao.SGD(lr=1.0), accumulate=2)
    opt.step({"a": np.ones(3)})
    opt.save(tmp_path / "x")
    saved = opt.state_dict()

    def rank(comm):
        many = ao.Optimizer({"a": np.zeros(3)}, ao.SGD(lr=1.0), accumulate=2, comm=ao.Ranks(comm, grads="sum"))
        return [caught(call)[0] for call in (lambda: many.load(tmp_path / "x"), lambda: many.load_state_dict(saved))]

    assert all("accumulate different gradients" in x for x in chain(*ao.ranks.run(2, rank)))


def broken_off(opt, comm, grads):
    """A step that rank 1 breaks off in the middle."""
    if comm.rank == 1:
        opt._team.gather = lambda tensors, **_: 1 / 0
    caught(lambda: opt.step(grads))
    if comm.rank == 1:
        del opt._team.gather


@each_compiled
def test_a_checkpoint_without_parameters_does_not_mend(engine, tmp_path):
    """Ranks went on with parameters of different steps."""

    def rank(comm):
        opt = ao.Optimizer(parameters(FLAT), ao.SGD(lr=1.0), comm=comm, engine=engine)
        opt.save(tmp_path / "x", params=False)
        broken_off(opt, comm, gradients(0, FLAT))
        return [caught(call)[0] for call in (lambda: opt.load(tmp_path / "x"), lambda: opt.step(gradients(0, FLAT)))]

    for loaded, stepped in ao.ranks.run(2, rank):
        assert "the state has no parameters" in loaded
        assert "load a checkpoint on all" in stepped


@each_compiled
def test_ranks_need_not_meet_between_a_torn_step_and_a_load(engine, tmp_path):
    """A rank that gave up a little later tore the others' load."""

    def rank(comm):
        opt = ao.Optimizer(parameters(FLAT), ao.SGD(lr=1.0), comm=comm, engine=engine)
        opt.save(tmp_path / "x")
        for _ in range(20):
            broken_off(opt, comm, gradients(0, FLAT))
            opt.load(tmp_path / "x")
        return opt.step(gradients(0, FLAT))["a"].tobytes()

    one, other = ao.ranks.run(2, rank)
    assert one == other


def test_files_that_are_not_the_same(tmp_path):
    for i in range(2):
        ao.Optimizer({"x": np.full(3, 1.0 + i)}, ao.SGD(lr=0.1)).save(tmp_path / str(i))

    def rank(comm):
        opt = ao.Optimizer({"x": np.zeros(3)}, ao.SGD(lr=0.1), comm=comm)
        return caught(lambda: opt.load(tmp_path / str(comm.rank)))[0], opt.params["x"].tolist()

    for said, x in ao.ranks.run(2, rank):
        assert "the checksum of the file is" in said
        assert x == [0.0] * 3


def test_averages_of_parts_are_whole():
    def rank(comm):
        parts = {name: ao.Part(np.ones((2, 4)), (2 * comm.rank, 0), (4, 4)) for name in "ab"}
        opt = ao.Optimizer(parts, ao.SGD(lr=1.0), groups={"a": {"ema_decay": 0.9}}, comm=comm)
        opt.step({name: np.full((2, 4), float(comm.rank)) for name in "ab"})
        return {name: x.tolist() for name, x in opt.averaged().items()}

    one, other = ao.ranks.run(2, rank)
    assert one == other
    assert one["b"] == [[1.0] * 4] * 2 + [[0.0] * 4] * 2


@each_engine
def test_sums_that_are_loaded_in_the_middle(engine, tmp_path):
    """One process: a snapshot held the sum that the next micro-step wrote, and a load was not gone on from."""

    def steps(opt, *values):
        for x in values:
            opt.step({"a": None if x is None else np.full(3, x), "b": np.full(3, 1.0)})
        return opt.params["a"].tolist()

    opt = ao.Optimizer({"a": np.zeros(3), "b": np.zeros(3)}, ao.SGD(lr=1.0), accumulate=2, engine=engine)
    opt.save(tmp_path / "x")
    steps(opt, 1.0)
    saved = opt.state_dict()
    assert steps(opt, 1.0, 9.0) == [-1.0] * 3
    opt.load_state_dict(saved)
    assert steps(opt, 0.0) == [-1.5] * 3
    opt.load(tmp_path / "x")
    steps(opt, None)
    opt.save(tmp_path / "y")
    opt.load(tmp_path / "y")
    assert steps(opt, 1.0) == [-0.5] * 3

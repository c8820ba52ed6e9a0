"""Steps that do not wait for the parameters of other ranks: they arrive while something else is computed."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import arrayopt as ao
from arrayopt.ranks import gather
from tests.conftest import BACKENDS
from tests.support.engines import COMPILED
from tests.support.ranks import SHAPES, contents, differing, gradients, parameters
from tests.support.slow import settled


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch):
    monkeypatch.setattr(gather, "ROUND", 1 << 15)
    monkeypatch.setattr(gather, "LARGE", 1 << 12)


@settled(5)
@given(
    st.sampled_from(COMPILED),
    st.sampled_from(["numpy", "torch", "jax"]),
    st.sampled_from([ao.LAMB(lr=0.01), ao.AdamW(lr=0.01)]),
    st.integers(2, 4),
    st.integers(0, 2**20),
)
def test_random_programs(engine, library, rule, ranks, seed):
    """Each rank waits for other tensors, and reads other things between steps."""
    array = {"numpy": np.array, "torch": torch.tensor, "jax": BACKENDS["jax"].array}[library]
    engine = "auto" if library == "jax" else engine
    without = [
        [name for name in SHAPES if x < 0.2] for x in np.random.default_rng(seed).random((4, len(SHAPES)))[:, :1]
    ]

    def rank(comm):
        rng = np.random.default_rng([seed, comm.rank])
        opts = []
        for _ in range(2):
            params = {name: array(x) for name, x in parameters().items()}
            opts.append(ao.Optimizer(params, rule, comm=comm, engine=engine))
        found = []
        for k in range(4):
            grads = {name: None if g is None else array(g) for name, g in gradients(k, without=without[k]).items()}
            opts[0].step(grads)
            assert opts[1].step(grads, wait=False) is None
            for name in rng.choice(list(SHAPES), rng.integers(0, 4)):
                x = opts[1].wait(str(name))
                if np.asarray(x).tobytes() != np.asarray(opts[0].params[str(name)]).tobytes():
                    found.append((k, name))
            if rng.random() < 0.3:
                found += [
                    name
                    for name, x in opts[1].params.items()
                    if np.asarray(x).tobytes() != np.asarray(opts[0].params[name]).tobytes()
                ]
        return found + differing(contents(opts[0]), contents(opts[1]))

    assert ao.ranks.run(ranks, rank) == [[]] * ranks


def test_everything_that_reads_parameters_waits(tmp_path):
    def rank(comm):
        one, other = (ao.Optimizer(parameters(), ao.AdamW(lr=0.01), comm=comm) for _ in range(2))
        for k in range(5):
            one.step(gradients(k))
            other.step(gradients(k), wait=False)
            if k == 0:
                other.save(tmp_path / "x")
            elif k == 1:
                assert differing(contents(one), contents(copy.deepcopy(other))) == []
            elif k == 2:
                other.load(tmp_path / "x")
                one.load(tmp_path / "x")
            elif k == 3:
                other.lr = one.lr = 0.02  # needs no parameter
                assert other._step.is_arriving
                assert other.wait() is other.params
                assert not other._step.is_arriving
        return differing(contents(one), contents(other))

    assert ao.ranks.run(3, rank) == [[]] * 3


def test_gradients_given_and_parameters_awaited():
    def rank(comm):
        there = ao.Ranks(comm, grads="mean")
        one, other = (ao.Optimizer(parameters(), ao.LAMB(lr=0.01), comm=there) for _ in range(2))
        for k in range(3):
            grads = gradients(k, seed=comm.rank)
            one.step(grads)
            for name in reversed(SHAPES):
                other.give(name, grads[name])
            assert other.step(wait=False) is None
            for name in SHAPES:
                np.testing.assert_array_equal(other.wait(name), one.params[name])
        return differing(contents(one), contents(other))

    assert ao.ranks.run(3, rank) == [[]] * 3


def test_one_process_has_everything_at_once():
    opt = ao.Optimizer({"w": np.ones(3)}, ao.SGD(lr=0.5))
    assert opt.step({"w": np.ones(3)}, wait=False) is None
    assert opt.wait("w").tolist() == [0.5, 0.5, 0.5]
    with pytest.raises(ValueError, match=r"Optimizer.wait: there is no tensor 'x'"):
        opt.wait("x")


def test_ranks_that_do_not_both_wait_are_told():
    def rank(comm):
        opt = ao.Optimizer(parameters(), ao.SGD(lr=0.5), comm=comm)
        with pytest.raises(ValueError, match="`wait` is False on rank 0, True on rank 1"):
            opt.step(gradients(0), wait=comm.rank == 1)

    ao.ranks.run(2, rank)


def test_a_rank_that_ends_is_an_error_at_the_next_call(tmp_path):
    errors = []

    def rank(comm):
        opt = ao.Optimizer(parameters(), ao.SGD(lr=0.5), comm=ao.Ranks(comm, timeout=20))
        opt.step(gradients(0), wait=False)
        opt.wait()
        if comm.rank == 1:
            raise KeyError("mine")
        for _ in range(2):
            try:
                opt.step(gradients(1), wait=False)
                opt.wait()
            except ao.RankError as error:
                errors.append(str(error))

    with pytest.raises(KeyError, match="mine"):
        ao.ranks.run(2, rank)
    assert len(errors) == 2
    assert "load a checkpoint" in errors[1]


def test_a_load_of_one_optimizer_leaves_what_is_on_its_way_to_another(tmp_path):
    """Both are over one communicator."""
    grads = {"w": np.ones(500)}

    def train(comm):
        one = ao.Optimizer({"w": np.ones(500)}, ao.AdamW(lr=0.1), comm=ao.Ranks(comm, timeout=5))
        other = ao.Optimizer({"v": np.ones(70)}, ao.LAMB(lr=0.1), comm=comm)
        other.save(tmp_path / "x.safetensors")
        for _ in range(2):
            one.step(grads, wait=False)
            other.load(tmp_path / "x.safetensors")
        return one.params["w"]

    alone = ao.Optimizer({"w": np.ones(500)}, ao.AdamW(lr=0.1))
    for _ in range(2):
        alone.step(grads)
    for found in ao.ranks.run(2, train):
        np.testing.assert_array_equal(found, alone.params["w"])

"""Parts of tensors whose rule needs them whole: one rank updates each, with the bits of one process."""

import itertools

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import arrayopt as ao
from arrayopt.params.groups import Group
from arrayopt.ranks import homes
from arrayopt.ranks.partition import divide
from arrayopt.ranks.threads import ThreadComm
from arrayopt.state.tensors import Tensor
from benchmarks.ranks import models
from tests.support.engines import COMPILED, NOW
from tests.support.ranks import contents, gradients, parameters
from tests.support.slow import settled

SHAPES = {
    "rows": (40, 30),
    "columns": (24, 60),
    "grid": (36, 28),
    "kernels": (10, 4, 3, 3),
    "one": (7, 5),
    "bias": (30,),
}
RULES = {
    "Muon": ao.Muon(lr=0.05),
    "NorMuon": ao.NorMuon(lr=0.05),
    "MuonH": ao.MuonH(lr=0.05),
    "SOAP": ao.SOAP(lr=0.01, precondition_frequency=2),
}
OPTIONS = {
    "nothing": {},
    "clipped": {"clip_norm": 0.01, "stats": True},
    "skips": {"skip_nonfinite": True},
    "accumulated": {"accumulate": 2},
    "scaled": {"loss_scale": ao.LossScale(init=64.0)},
}
BIASES = {"bias": ao.AdamW(lr=0.01)}


def place(name, rank, ranks, rng):
    """The place of a rank's part: stretches of an axis, all on one rank, or the same on all."""
    shape = SHAPES[name]
    if name == "one":
        return ((0, 0), shape) if rank == ranks - 1 else ((0, 0), (0, 5))
    if name == "grid" and ranks == 4:
        r, c = divmod(rank, 2)
        return (r * 20, c * 11), ((20, 16)[r], (11, 17)[c])
    if name == "kernels" and rng.random() < 0.3:
        return (0,) * 4, shape
    axis = int(name == "columns")
    ends = sorted([0, *rng.integers(0, shape[axis] + 1, ranks - 1).tolist(), shape[axis]])
    offset, own = [0] * len(shape), list(shape)
    offset[axis], own[axis] = ends[rank], ends[rank + 1] - ends[rank]
    return tuple(offset), tuple(own)


def part_of(x, where):
    return x[tuple(slice(a, a + n) for a, n in zip(*where, strict=True))].copy()


def run(engine, label, rule, ranks, seed, library=np.asarray, dtype=np.float32, groups=BIASES):
    """What differs from one process after some steps, given in random ways, on each rank."""
    options = OPTIONS[label]
    absent = [name for name in SHAPES if np.random.default_rng(seed).random() < 0.2]
    bad = ("rows",) if label in ("skips", "scaled") else ()
    steps = [gradients(k, SHAPES, dtype, without=absent if k == 1 else (), bad=bad if k == 3 else ()) for k in range(6)]

    def arrays():
        return {name: library(x) for name, x in parameters(SHAPES, dtype).items()}

    one = ao.Optimizer(arrays(), rule, groups=groups, engine=engine, **options)
    for grads in steps:
        one.step({name: None if g is None else library(g) for name, g in grads.items()})
    expected = contents(one)

    def rank(comm):
        where = {name: place(name, comm.rank, ranks, np.random.default_rng([seed, i])) for i, name in enumerate(SHAPES)}
        rng = np.random.default_rng([seed, comm.rank])

        def parts():
            found = {}
            for name, x in parameters(SHAPES, dtype).items():
                found[name] = ao.Part(library(part_of(x, where[name])), where[name][0], SHAPES[name])
            return found

        settings = ao.Ranks(comm, grads="mean", timeout=60)
        opt = ao.Optimizer(parts(), rule, groups=groups, engine=engine, comm=settings, **options)
        for k, grads in enumerate(steps):
            mine = {name: None if g is None else library(part_of(g, where[name])) for name, g in grads.items()}
            if (seed + k) % 2 and any(g is not None for g in mine.values()):
                names = [name for name in SHAPES if mine[name] is not None]
                rng.shuffle(names)
                for name in names:
                    opt.give(name, mine[name])
                opt.step(wait=False)
            else:
                opt.step(mine)
        found = []
        for name, x in opt.params.items():
            if np.asarray(x.array).tobytes() != part_of(np.asarray(one.params[name]), where[name]).tobytes():
                found.append(name)
        state = opt.state_dict()
        for name, about in state["tensors"].items():
            found += [(name, "t")] * (about["t"] != expected[name, "t"])
            for slot, x in about["slots"].items():
                found += [(name, slot)] * (np.asarray(x).tobytes() != expected[name, slot])
        other = ao.Optimizer(parts(), rule, groups=groups, engine=engine, comm=settings, **options)
        other.load_state_dict(state)
        return found + [key for key in expected if other.state_dict()["step"] != expected["step"]]

    return ao.ranks.run(ranks, rank)


@settled(5)
@given(
    st.sampled_from([engine for engine in COMPILED if engine in NOW]),
    st.sampled_from(sorted(OPTIONS)),
    st.sampled_from(sorted(RULES)),
    st.integers(2, 4),
    st.integers(0, 2**20),
)
def test_random_programs(engine, label, name, ranks, seed):
    assert run(engine, label, RULES[name], ranks, seed) == [[]] * ranks


@pytest.mark.parametrize("engine", ["numpy", "array_api"])
def test_engines_that_cannot_share_a_tensor_update_whole_ones(engine):
    def rank(comm):
        part = ao.Part(np.ones((3, 8), np.float32), (3 * comm.rank, 0), (6, 8))
        opt = ao.Optimizer({"w": part}, ao.Muon(lr=0.1), comm=comm, engine=engine)
        opt.step({"w": np.arange(24, dtype=np.float32).reshape(3, 8) + 24 * comm.rank})
        return part.array

    whole = {"w": np.ones((6, 8), np.float32)}
    ao.Optimizer(whole, ao.Muon(lr=0.1), engine=engine).step({"w": np.arange(48, dtype=np.float32).reshape(6, 8)})
    np.testing.assert_array_equal(np.vstack(ao.ranks.run(2, rank)), whole["w"])


def test_sixteen_bits_with_masters():
    assert run("auto", "nothing", RULES["Muon"], 3, 5, dtype=ml_dtypes.bfloat16) == [[]] * 3


def test_state_of_eight_bits():
    assert (
        run("auto", "nothing", ao.Muon(lr=0.05, state_dtype="int8"), 3, 6, groups={"bias": ao.SGD(lr=0.1)}) == [[]] * 3
    )


def test_tensors_of_pytorch():
    assert run("auto", "clipped", RULES["NorMuon"], 2, 4, torch.tensor) == [[]] * 2


def test_what_is_written_into_a_part_counts():
    def rank(comm):
        part = ao.Part(np.ones((3, 8), np.float32), (3 * comm.rank, 0), (6, 8))
        opt = ao.Optimizer({"w": part}, ao.Muon(lr=0.1), comm=comm)
        for k in range(2):
            part.array[...] = 2.0 + k
            opt.step({"w": np.ones((3, 8), np.float32)})
        return part.array

    whole = np.ones((6, 8), np.float32)
    one = ao.Optimizer({"w": whole}, ao.Muon(lr=0.1))
    for k in range(2):
        whole[...] = 2.0 + k
        one.step({"w": np.ones((6, 8), np.float32)})
    np.testing.assert_array_equal(np.vstack(ao.ranks.run(2, rank)), whole)


def test_a_step_sends_one_message_to_each_owner_and_one_back(monkeypatch):
    sent, start = [], ThreadComm.start_alltoall

    def counted(self, flat, counts, *others):
        sent.append((self.rank, sum(count > 0 for r, count in enumerate(counts) if r != self.rank)))
        return start(self, flat, counts, *others)

    monkeypatch.setattr(ThreadComm, "start_alltoall", counted)

    def rank(comm):
        part = {str(i): ao.Part(np.ones((3, 8), np.float32), (3 * comm.rank, 0), (9, 8)) for i in range(12)}
        opt = ao.Optimizer(part, ao.Muon(lr=0.1), comm=ao.Ranks(comm, check=None))
        comm.meet()()
        sent.clear()
        comm.meet()()
        opt.step({name: np.ones((3, 8), np.float32) for name in part})
        comm.meet()()
        return sorted(sent)

    assert ao.ranks.run(3, rank)[0] == sorted([(r, 2) for r in range(3)] * 2)


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("rule", [ao.Muon(lr=0.1), ao.SOAP()], ids=lambda rule: type(rule).__name__)
def test_owners_have_equal_work(ranks, rule):
    """The layers of Llama 7 B: no rank has 1.05 times the least work that one of them must have."""
    shapes = [shape for shape in models()["Llama 7 B"][1:-1] if len(shape) == 2]
    tensors = [Tensor(str(i), np.broadcast_to(np.float32(0), shape)) for i, shape in enumerate(shapes)]
    divide([Group("all", rule, {}, tensors)], "cpp", 0, ranks)
    loads, costs = np.zeros((2, ranks)), []
    for tensor in tensors:
        m, n = sorted(tensor.shape)
        (owner,) = tensor.share.holders
        if isinstance(rule, ao.SOAP):
            costs.append([m * n * (m + n)] * 2)
        else:  # symmetric products in half, as on CPUs, and in full, as on GPUs
            costs.append([3 * m * m * n + m**3, 4 * m * m * n + 2 * m**3])
        loads[:, owner] += costs[-1]
    dearest = np.sort(costs, axis=0)[::-1]
    least = np.maximum(loads.mean(axis=1), dearest[ranks - 1] + dearest[ranks])  # of so many two meet
    assert (loads.max(axis=1) <= 1.05 * least).all()


@pytest.mark.parametrize("ranks", [8, 64])
def test_no_other_owners_of_whole_matrices_have_much_less_work(ranks):
    """With the two embeddings of Llama 7 B, of 64 ranks two have more than the mean whoever has the rest: the fullest
    has at most 1.05 of the least that any owners of whole matrices give it, by an integer program.
    """
    optimize = pytest.importorskip("scipy.optimize")
    sides = [sorted(shape) for shape in models()["Llama 7 B"] if len(shape) == 2]
    costs = [3 * m * m * n + m**3 for m, n in sides]
    loads = np.zeros(ranks)
    for cost, owner in zip(costs, homes.owners(costs, ranks), strict=True):
        loads[owner] += cost
    kinds, numbers = np.unique(costs, return_counts=True)
    limit = loads.max() / 1.05
    most = [range(min(number, int(limit // kind)) + 1) for kind, number in zip(kinds, numbers, strict=True)]
    fits = [x for x in itertools.product(*most) if np.dot(x, kinds) <= limit]
    have_owners = optimize.LinearConstraint(np.array(fits).T, numbers, np.inf)
    of_ranks = optimize.LinearConstraint(np.ones((1, len(fits))), 0, ranks)
    whole, bounds = np.ones(len(fits)), optimize.Bounds(0, ranks)
    found = optimize.milp(np.zeros(len(fits)), constraints=[have_owners, of_ranks], integrality=whole, bounds=bounds)
    assert found.status == 2, found.message  # there are none


def test_whole_tensors_are_shared_out_by_work_too():
    """A wide matrix takes more work than a tall vector of as many elements: the rule decides, not the size."""
    shapes = {f"w{i}": (64, 64) for i in range(4)} | {"wide": (64, 256)}

    def rank(comm):
        opt = ao.Optimizer(parameters(shapes), ao.Muon(lr=0.1), comm=comm)
        return [tensor.name for tensor in opt._parameters.all if tensor.kind == "whole"]

    assert sorted(map(len, ao.ranks.run(2, rank))) == [1, 4]

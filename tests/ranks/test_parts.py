"""Parts of larger tensors that the user holds: norms are the whole tensor's."""

import numpy as np
import pytest
import torch

import arrayopt as ao
from tests.support.ranks import gradients, parameters

SHAPES = {"rows": (300, 100), "columns": (64, 2000), "blocks": (90, 700), "same": (50,), "one": (7, 3), "few": (3, 2)}
SHAPES["scalar"] = ()
"""Each is laid out in another way; see `blocks`."""


def blocks(name, rank, ranks):
    """The offset and shape of a rank's part."""
    shape = SHAPES[name]
    if name in ("same", "scalar"):
        return (0,) * len(shape), shape
    if name == "one":  # all on the last rank
        return ((0, 0), shape) if rank == ranks - 1 else ((0, 0), (0, 3))
    if name == "blocks" and ranks == 4:
        r, c = divmod(rank, 2)
        return (r * 40, c * 300), ((40, 50)[r], (300, 400)[c])
    if name == "few":  # one row each, and then none
        first, n = ((0, 2), (2, 1))[rank] if ranks == 2 else (min(rank, 2), rank < 3)
        return (first, 0), (int(n), 2)
    axis = 1 if name == "columns" else 0
    ends = [round(shape[axis] * r / ranks * 0.9) if r < ranks else shape[axis] for r in range(ranks + 1)]
    offset, own = [0, 0], list(shape)
    offset[axis], own[axis] = ends[rank], ends[rank + 1] - ends[rank]
    return tuple(offset), tuple(own)


def taken(name, x, rank, ranks):
    """A rank's part of a whole array, copied."""
    return x[tuple(slice(a, a + n) for a, n in zip(*blocks(name, rank, ranks), strict=True))].copy()


def parts(rank, ranks):
    """A rank's parts of the parameters."""
    return {
        name: ao.Part(np.asarray(taken(name, x, rank, ranks)), blocks(name, rank, ranks)[0], SHAPES[name])
        for name, x in parameters(SHAPES).items()
    }


RULES = {
    "LAMB": (ao.LAMB(lr=0.01), {"clip_norm": 0.5, "stats": True}),
    "LANS": (ao.LANS(lr=0.01), {}),
    "LARS": (ao.LARS(lr=0.1), {"loss_scale": 8.0}),
    "AdamW": (ao.AdamW(lr=0.01), {"clip_norm": 0.5}),
    "AdamW in micro-steps": (ao.AdamW(lr=0.01), {"accumulate": 2}),
}


@pytest.mark.parametrize("label", RULES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_norms_are_those_of_whole_tensors(label, ranks, tmp_path):
    rule, options = RULES[label]
    whole = {name: np.asarray(x) for name, x in parameters(SHAPES).items()}
    one = ao.Optimizer(whole, rule, engine="numba", **options)
    for k in range(4):
        one.step(gradients(k, SHAPES))

    def rank(comm):
        mine = parts(comm.rank, ranks)
        opt = ao.Optimizer(mine, rule, comm=comm, **options)
        for k in range(4):
            given = opt.step({n: taken(n, g, comm.rank, ranks) for n, g in gradients(k, SHAPES).items()})
        assert given is mine
        opt.save(tmp_path / "x")
        other = ao.Optimizer(parts(comm.rank, ranks), type(rule)(lr=0.5), comm=comm, **options)
        other.load(tmp_path / "x")
        same = all(mine[n].array.tobytes() == other.params[n].array.tobytes() for n in SHAPES)
        return {n: x.array for n, x in mine.items()}, opt.state_dict()["tensors"], same, opt.stats

    results = ao.ranks.run(ranks, rank)
    for r, (mine, state, same, stats) in enumerate(results):
        assert same
        for name, x in mine.items():
            np.testing.assert_allclose(x, taken(name, one.params[name], r, ranks), rtol=2e-6, atol=2e-6)
        for name, slots in one.state_dict()["tensors"].items():
            for slot, x in slots["slots"].items():
                np.testing.assert_allclose(state[name]["slots"][slot], x, rtol=2e-6, atol=1e-9)
        if options.get("stats"):
            for name, report in one.stats.read().items():
                assert stats.read()[name] == pytest.approx(report, rel=1e-6)
    loaded = ao.Optimizer(
        parameters(SHAPES), type(rule)(lr=0.5), engine="numba", **options
    )  # one process reads the file
    loaded.load(tmp_path / "x")
    for name, x in results[-1][0].items():
        assert taken(name, loaded.params[name], ranks - 1, ranks).tobytes() == x.tobytes()


def test_whole_tensors_beside_parts():
    """What is no part is divided among the ranks as ever."""
    shapes = SHAPES | {"long": (100_000,)}
    one = ao.Optimizer(parameters(shapes), ao.LAMB(lr=0.01), engine="numba")
    for k in range(2):
        one.step(gradients(k, shapes))

    def rank(comm):
        params = parts(comm.rank, 2) | {"long": parameters(shapes)["long"]}
        opt = ao.Optimizer(params, ao.LAMB(lr=0.01), comm=comm)
        for k in range(2):
            every = gradients(k, shapes)
            opt.step({n: taken(n, g, comm.rank, 2) for n, g in every.items() if n in SHAPES} | {"long": every["long"]})
        return params["long"], opt.state["long"]["m"].size

    results = ao.ranks.run(2, rank)
    assert all((long == one.params["long"]).all() for long, _ in results)
    assert sum(n for _, n in results) == 100_000


def test_tensors_of_pytorch():
    def rank(comm):
        x = torch.ones(30, 40)
        opt = ao.Optimizer([ao.Part(x, (30 * comm.rank, 0), (60, 40))], ao.LARS(lr=1.0), comm=comm)
        opt.step([torch.full((30, 40), 2.0)])
        return x

    whole = torch.ones(60, 40)
    ao.Optimizer([whole], ao.LARS(lr=1.0), engine="numba").step([torch.full((60, 40), 2.0)])
    found = ao.ranks.run(2, rank)
    torch.testing.assert_close(torch.cat(found), whole, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ao.Part(3, (0,), (3,)), "`array` must be an array"),
        (lambda: ao.Part(np.ones(3), (1,), (3,)), "must lie within a tensor of shape"),
        (lambda: ao.Part(np.ones(3), (0, 0), (3, 3)), "must lie within a tensor of shape"),
        (lambda: ao.Optimizer([ao.Part(np.ones(3), (0,), (6,))], ao.SGD(lr=0.1)), "give `comm`"),
    ],
)
def test_what_is_no_part(make, words):
    with pytest.raises((TypeError, ValueError), match=words):
        make()


@pytest.mark.parametrize(
    ("offsets", "rule", "engine", "words"),
    [
        ((0, 0), ao.SGD(lr=0.1), "auto", "must fill a tensor of shape"),
        ((0, 2), ao.SGD(lr=0.1), "auto", "must fill a tensor of shape"),
        ((0, 3), ao.CAME(lr=0.1), "auto", "sums over rows or columns"),
        ((0, 3), ao.LAMB(lr=0.1, grad_centralization=True), "auto", "sums over rows or columns"),
        ((0, 3), ao.LAMB(lr=0.1), "numpy", "engine 'numba' takes"),
    ],
)
def test_parts_that_cannot_be_run(offsets, rule, engine, words):
    def rank(comm):
        part = ao.Part(np.ones((3, 8)), (offsets[comm.rank], 0), (6, 8))
        with pytest.raises(ValueError, match=words):
            ao.Optimizer([part], rule, comm=comm, engine=engine)

    ao.ranks.run(2, rank)

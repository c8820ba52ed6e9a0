"""Parts of larger tensors that the user holds: norms are the whole tensor's."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import arrayopt as ao
from tests.support.engines import each_compiled
from tests.support.parts import SHAPES, parts, taken
from tests.support.ranks import gradients, parameters
from tests.support.slow import marked

RULES = {
    "LAMB": (ao.LAMB(lr=0.01), {"clip_norm": 0.5, "stats": True}),
    "LANS": (ao.LANS(lr=0.01), {}),
    "LARS": (ao.LARS(lr=0.1), {"loss_scale": 8.0}),
    "AdamW": (ao.AdamW(lr=0.01), {"clip_norm": 0.5}),
    "AdamW in micro-steps": (ao.AdamW(lr=0.01), {"accumulate": 2}),
    "CAME": (ao.CAME(lr=0.01), {"clip_norm": 0.5, "stats": True}),
    "Adafactor": (ao.Adafactor(), {}),
    "LAMB, centralized": (ao.LAMB(lr=0.01, grad_centralization=True), {}),
    "CAME, random numbers": (ao.CAME(lr=0.01, project=lambda xp, p, h: p + h.lr * (ao.random(h) - 0.5)), {}),
}
LATER = ("CAME", "Adafactor", "LAMB, centralized", "CAME, random numbers")


@each_compiled
@pytest.mark.parametrize(
    ("label", "ranks"), marked([(x, n) for x in RULES for n in (2, 4)], lambda label, ranks: label not in LATER)
)
def test_norms_are_those_of_whole_tensors(engine, label, ranks, tmp_path):
    rule, options = RULES[label]
    whole = {name: np.asarray(x) for name, x in parameters(SHAPES).items()}
    one = ao.Optimizer(whole, rule, engine=engine, **options)
    for k in range(4):
        one.step(gradients(k, SHAPES))

    def rank(comm):
        mine = parts(comm.rank, ranks)
        opt = ao.Optimizer(mine, rule, comm=comm, engine=engine, **options)
        for k in range(4):
            given = opt.step({n: taken(n, g, comm.rank, ranks) for n, g in gradients(k, SHAPES).items()})
        assert given is mine
        opt.save(tmp_path / "x")
        anew = rule if label == "Adafactor" else replace(rule, lr=0.5)
        other = ao.Optimizer(parts(comm.rank, ranks), anew, comm=comm, engine=engine, **options)
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
                np.testing.assert_allclose(
                    state[name]["slots"][slot], x, rtol=2e-6, atol=1e-9 if label not in LATER else 3e-7
                )
        if options.get("stats"):
            found = stats.read()
            for name, report in one.stats.read().items():
                for (
                    key,
                    x,
                ) in report.items():  # the norm of an update is taken of p_new - p, whose error is as that of p
                    near = 2e-7 * report["param_norm"] if key == "update_norm" else 0.0
                    assert found[name][key] == pytest.approx(x, rel=1e-6, abs=near), (name, key)
    loaded = ao.Optimizer(
        parameters(SHAPES), rule if label == "Adafactor" else replace(rule, lr=0.5), engine=engine, **options
    )  # one process reads the file
    loaded.load(tmp_path / "x")
    for name, x in results[-1][0].items():
        assert taken(name, loaded.params[name], ranks - 1, ranks).tobytes() == x.tobytes()


@each_compiled
def test_whole_tensors_beside_parts(engine):
    """What is no part is divided among the ranks as ever."""
    shapes = SHAPES | {"long": (100_000,)}
    one = ao.Optimizer(parameters(shapes), ao.LAMB(lr=0.01), engine=engine)
    for k in range(2):
        one.step(gradients(k, shapes))

    def rank(comm):
        params = parts(comm.rank, 2) | {"long": parameters(shapes)["long"]}
        opt = ao.Optimizer(params, ao.LAMB(lr=0.01), comm=comm, engine=engine)
        for k in range(2):
            every = gradients(k, shapes)
            opt.step({n: taken(n, g, comm.rank, 2) for n, g in every.items() if n in SHAPES} | {"long": every["long"]})
        return params["long"], opt.state["long"]["m"].size

    results = ao.ranks.run(2, rank)
    assert all((long == one.params["long"]).all() for long, _ in results)
    assert sum(n for _, n in results) == 100_000


@each_compiled
def test_tensors_of_pytorch(engine):
    def rank(comm):
        x = torch.ones(30, 40)
        opt = ao.Optimizer([ao.Part(x, (30 * comm.rank, 0), (60, 40))], ao.LARS(lr=1.0), comm=comm, engine=engine)
        opt.step([torch.full((30, 40), 2.0)])
        return x

    whole = torch.ones(60, 40)
    ao.Optimizer([whole], ao.LARS(lr=1.0), engine=engine).step([torch.full((60, 40), 2.0)])
    found = ao.ranks.run(2, rank)
    torch.testing.assert_close(torch.cat(found), whole, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ao.Part(3, (0,), (3,)), "`array` must be an array"),
        (lambda: ao.Part(np.ones(3), (1,), (3,)), "must lie within a tensor of shape"),
        (lambda: ao.Part(np.ones(3), (0, 0), (3, 3)), "must lie within a tensor of shape"),
        (lambda: ao.Optimizer([ao.Part(np.ones(3), (0,), (6,))], ao.SGD(lr=0.1)), "pass `comm`"),
    ],
)
def test_what_is_no_part(make, words):
    with pytest.raises((TypeError, ValueError), match=words):
        make()


@dataclass(frozen=True, kw_only=True)
class Drift(ao.Rule):
    """A rule with a slot that begins as a sum of the parameter."""

    lr: float

    def slots(self, xp, p):
        return {"first": xp.sum(p)}

    def update(self, xp, p, g, s, h):
        return p - h.lr * s["first"] * g, s


@pytest.mark.parametrize(
    ("offsets", "rule", "engine", "words"),
    [
        ((0, 0), ao.SGD(lr=0.1), "auto", "must cover a tensor of shape"),
        ((0, 2), ao.SGD(lr=0.1), "auto", "must cover a tensor of shape"),
        ((0, 3), Drift(lr=0.1), "auto", "is made from the values of 'w', but this rank"),
        ((0, 3), ao.LAMB(lr=0.1), "numpy", "only engines 'numba', 'cpp' and 'cupy' support"),
    ],
)
def test_parts_that_cannot_be_run(offsets, rule, engine, words):
    def rank(comm):
        part = ao.Part(np.ones((3, 8)), (offsets[comm.rank], 0), (6, 8))
        with pytest.raises(ValueError, match=words):
            ao.Optimizer({"w": part}, rule, comm=comm, engine=engine)

    ao.ranks.run(2, rank)


ROWS = ao.CAME(lr=0.01)


@each_compiled
def test_rows_cut_between_units_give_what_one_process_does(engine):
    """To the last bit; the state too, in which row and column sums are whole, and the rest is a part."""
    one = ao.Optimizer({"w": np.ones((512, 128), np.float32)}, ROWS, engine=engine)
    grads = [gradients(k, {"w": (512, 128)})["w"] for k in range(3)]
    for g in grads:
        one.step({"w": g})
    whole = {slot: x.tobytes() for slot, x in one.state_dict()["tensors"]["w"]["slots"].items()}

    def rank(comm):
        rows = slice(256 * comm.rank, 256 * comm.rank + 256)
        w = np.ones((256, 128), np.float32)
        opt = ao.Optimizer({"w": ao.Part(w, (rows.start, 0), (512, 128))}, ROWS, comm=comm, engine=engine)
        for g in grads:
            opt.step({"w": g[rows]})
        assert {slot: opt.state["w"][slot].shape for slot in ("m", "r", "c")} == {
            "m": (256, 128),
            "r": (512,),
            "c": (128,),
        }
        assert {slot: x.tobytes() for slot, x in opt.state_dict()["tensors"]["w"]["slots"].items()} == whole
        assert w.tobytes() == one.params["w"][rows].tobytes()

    ao.ranks.run(2, rank)


PINWHEEL = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
STAIRS = [((0, 0), (2, 3)), ((2, 0), (1, 2)), ((2, 2), (1, 1))]


@pytest.mark.parametrize("blocks", [PINWHEEL, STAIRS], ids=["pinwheel", "stairs"])
def test_sums_over_rows_and_columns_need_parts_of_a_grid(blocks):
    def rank(comm):
        offset, shape = blocks[comm.rank]
        part = ao.Part(np.ones(shape, np.float32), offset, (3, 3))
        with pytest.raises(ValueError, match=r"'w' must be divided along whole rows and columns.*got parts"):
            ao.Optimizer({"w": part}, ao.CAME(lr=0.1), comm=comm)
        opt = ao.Optimizer({"w": part}, ao.LARS(lr=0.1), comm=comm)  # norms alone need none
        opt.step({"w": np.ones(shape, np.float32)})
        opt.grad_centralization = True
        with pytest.raises((ValueError, ao.RankError), match="must be divided along whole rows and columns"):
            opt.step({"w": np.ones(shape, np.float32)})

    ao.ranks.run(len(blocks), rank)


def halves(comm, engine, x=None):
    """An optimizer of two ranks over one matrix of (4, 3), of which each has two rows; as its own array, if given."""
    x = np.ones((2, 3)) if x is None else x
    part = ao.Part(x, (2 * comm.rank, 0), (4, 3))
    return ao.Optimizer({"w": part}, MOMENTUM, comm=comm, engine=engine)


MOMENTUM = ao.SGD(lr=1.0, momentum=0.5, ema_decay=0.5, lookahead_steps=2)
GRADIENT = np.arange(12.0).reshape(4, 3)


@each_compiled
def test_parts_may_lie_in_memory_in_another_order(engine):
    """Their slots lie as they do."""
    one = ao.Optimizer({"w": np.ones((4, 3))}, MOMENTUM, engine=engine)
    for _ in range(2):
        one.step({"w": GRADIENT})
    whole = one.state_dict()["tensors"]["w"]["slots"]

    def rank(comm):
        x = np.ones((2, 3), order="F")
        opt = halves(comm, engine, x)
        for _ in range(2):
            opt.step({"w": GRADIENT[2 * comm.rank :][:2]})
        slots = opt.state_dict()["tensors"]["w"]["slots"]
        assert (x == one.params["w"][2 * comm.rank :][:2]).all()
        assert all((slots[slot] == y).all() for slot, y in whole.items())

    ao.ranks.run(2, rank)


@each_compiled
def test_a_snapshot_of_parts_is_loaded(engine):
    """It is of whole slots, and each rank takes its part of them."""

    def rank(comm):
        opt, other = halves(comm, engine), halves(comm, engine)
        opt.step({"w": GRADIENT[2 * comm.rank :][:2]})
        other.load_state_dict(opt.state_dict())
        for slot in ("buf", "slow", "ema"):
            assert (other.state["w"][slot] == opt.state["w"][slot]).all()

    ao.ranks.run(2, rank)


@each_compiled
def test_parts_of_a_tensor_without_elements(engine, tmp_path):
    def rank(comm):
        def made():
            part = ao.Part(np.ones((comm.rank, 0, 2)), (0, 0, 0), (7, 0, 2))
            return ao.Optimizer({"w": part}, MOMENTUM, comm=comm, engine=engine)

        opt, other = made(), made()
        opt.step({"w": np.ones((comm.rank, 0, 2))})
        opt.save(tmp_path / "x")
        other.load(tmp_path / "x")
        other.load_state_dict(opt.state_dict())
        assert opt.averaged()["w"].shape == opt.state_dict()["tensors"]["w"]["slots"]["buf"].shape == (7, 0, 2)
        assert other.state["w"]["buf"].shape == (comm.rank, 0, 2)

    ao.ranks.run(2, rank)


@each_compiled
def test_parts_of_another_place_are_refused(engine):
    def rank(comm):
        opt = halves(comm, engine)
        there = ao.Part(np.zeros((2, 3)), (2 - 2 * comm.rank, 0), (4, 3))
        with pytest.raises(ValueError, match=r"'w' is the part from .* expected from"):
            opt.params = {"w": there}
        with pytest.raises((ValueError, ao.RankError), match=r"'w' is the part from .* expected from"):
            opt.step({"w": there})
        opt.params = {"w": ao.Part(np.zeros((2, 3)), (2 * comm.rank, 0), (4, 3))}
        assert opt.step({"w": ao.Part(np.ones((2, 3)), (2 * comm.rank, 0), (4, 3))})["w"].array[0, 0] == -1.0

    ao.ranks.run(2, rank)


@each_compiled
def test_the_same_part_has_the_same_values(engine):
    def rank(comm):
        with pytest.raises(ValueError, match="ranks 0 and 1 have the same part of 'w', but different values"):
            ao.Optimizer({"w": ao.Part(np.full(3, 1.0 * comm.rank), (0,), (3,))}, MOMENTUM, comm=comm, engine=engine)

    ao.ranks.run(2, rank)


@each_compiled
def test_parts_stay_parts(engine):
    """In lists of groups, and where an array cannot be written."""

    def rank(comm):
        x = np.ones((2, 3))
        x.flags.writeable = False
        opt = halves(comm, engine, x)
        opt.step({"w": np.ones((2, 3))})
        assert opt.params["w"].offset == (2 * comm.rank, 0)
        part = ao.Part(np.ones((2, 3)), (2 * comm.rank, 0), (4, 3))
        opt = ao.Optimizer([{"params": iter([part])}], MOMENTUM, comm=comm, engine=engine)
        assert opt.step([np.ones((2, 3))])[0] is part

    ao.ranks.run(2, rank)


@each_compiled
def test_groups_are_added_beside_parts(engine):
    def rank(comm):
        opt = halves(comm, engine)
        opt.add_group({"whole": np.ones(3)})
        opt.add_group({"more": ao.Part(np.ones((2, 3)), (2 * comm.rank, 0), (4, 3))})
        with pytest.raises(ValueError, match="must cover a tensor"):
            opt.add_group({"half": ao.Part(np.ones((2, 3)), (0, 0), (4, 3))})
        p = opt.step({"w": np.ones((2, 3)), "whole": np.ones(3), "more": np.full((2, 3), 2.0)})
        assert (p["w"].array[0, 0], p["whole"][0], p["more"].array[0, 0]) == (0.0, 0.0, -1.0)
        other = ao.Optimizer({"w": np.ones(3)}, MOMENTUM, comm=comm, engine=engine)
        other.add_group({"more": ao.Part(np.ones((2, 3)), (2 * comm.rank, 0), (4, 3))})
        assert other.step({"w": np.ones(3), "more": np.ones((2, 3))})["more"].array[0, 0] == 0.0

    ao.ranks.run(2, rank)


@each_compiled
def test_a_rank_without_elements_meets_the_others_where_gradients_are_absent(engine):
    """What it has no part of counts among the tensors of a step."""
    rule = ao.LARS(lr=1.0, trust_coefficient=1.0)
    one = ao.Optimizer({"w": np.ones((4, 3)), "v": np.ones((4, 3))}, rule, engine=engine, clip_norm=0.5)
    one.step({"w": GRADIENT, "v": None})

    def rank(comm):
        first = (0, 2, 4, 4)[comm.rank :][:2]
        params = {
            "w": ao.Part(np.ones((first[1] - first[0], 3)), (first[0], 0), (4, 3)),
            "v": ao.Part(np.ones((4, 1)), (0, comm.rank), (4, 3)),
        }
        opt = ao.Optimizer(params, rule, comm=comm, engine=engine, clip_norm=0.5, stats=True)
        opt.step({"w": GRADIENT[slice(*first)], "v": None})
        np.testing.assert_allclose(params["w"].array, one.params["w"][slice(*first)], rtol=1e-12)
        return opt.stats.read()

    stats = ao.ranks.run(3, rank)
    assert stats[0] == stats[1] == stats[2] != {}

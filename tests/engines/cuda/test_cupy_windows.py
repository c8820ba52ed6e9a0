"""The CuPy engine over parts of matrices, under rules with sums over rows and columns: what one process does."""

from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
import pytest

import arrayopt as ao
from tests.cudacpu import standin
from tests.engines.cuda.test_cupy import trees
from tests.support.slow import marked


def grid(*ends):
    """The offset and the shape of each block of a tensor that is cut along each axis at some places."""
    return [
        (tuple(a for a, _ in block), tuple(b - a for a, b in block))
        for block in product(*(list(pairwise(x)) for x in ends))
    ]


NOTHING = [((0, 0), (0, 0))]
CUTS = {
    "rows": {2: grid((0, 64, 130), (0, 128)), 3: [*grid((0, 128, 130), (0, 128)), *NOTHING]},
    "columns": {2: grid((0, 70), (0, 128, 150)), 3: grid((0, 30), (0, 128, 256, 270))},
    "twice": {2: grid((0, 70), (0, 150)) * 2, 3: grid((0, 64, 70), (0, 150)) + grid((0, 64), (0, 150))},
    "narrow": {2: grid((0, 256, 260), (0, 33)), 3: NOTHING + grid((0, 260), (0, 32, 33))},
    "matrices": {2: grid((0, 1, 3), (0, 2), (0, 70), (0, 33)), 3: grid((0, 1, 2, 3), (0, 2), (0, 70), (0, 33))},
    "kernels": {2: grid((0, 64, 70), (0, 4), (0, 3), (0, 3)), 3: grid((0, 64, 128, 150), (0, 4), (0, 3), (0, 3))},
}
"""For each tensor and number of ranks their parts, which end where tiles of the whole tensor do."""
for name, four in {
    "rows": grid((0, 64, 128, 130), (0, 128)) + NOTHING,
    "columns": grid((0, 64, 70), (0, 128, 150)),
    "twice": grid((0, 70), (0, 128, 150)) * 2,
    "narrow": grid((0, 256, 260), (0, 32, 33)),
    "matrices": grid((0, 1, 3), (0, 2), (0, 70), (0, 32, 33)),
    "kernels": grid((0, 64, 128, 192, 201), (0, 4), (0, 3), (0, 3)),
}.items():
    CUTS[name][4] = four


def shapes(ranks):
    """The shapes of the whole tensors."""
    ends = {name: [tuple(map(sum, zip(*x, strict=True))) for x in cuts[ranks]] for name, cuts in CUTS.items()}
    return {name: tuple(map(max, zip(*x, strict=True))) for name, x in ends.items()}


def taken(name, x, rank, ranks):
    """A rank's part of a whole array, with where it begins."""
    offset, shape = CUTS[name][ranks][rank]
    return np.ascontiguousarray(x[tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))]), offset


def trained(cupy, rule, ranks, comm=None, names=tuple(CUTS), **options):
    """An optimizer over whole tensors, or a rank's parts of them, after four steps: one without some gradients."""
    whole = {n: x for n, x in shapes(ranks).items() if n in names}
    params = {}
    for name, x in trees(whole, "float32", 1).items():
        part, offset = (x, None) if comm is None else taken(name, x, comm.rank, ranks)
        params[name] = cupy.asarray(part) if comm is None else ao.Part(cupy.asarray(part), offset, x.shape)
    opt = ao.Optimizer(params, rule, comm=comm, engine="cupy", **options)
    for k in range(4):
        grads = trees(whole, "float32", 10 + 10 * k)
        given = {n: cupy.asarray(g if comm is None else taken(n, g, comm.rank, ranks)[0]) for n, g in grads.items()}
        opt.step(given if k != 1 else given | dict.fromkeys({"columns"} & given.keys()))
    return opt


def held(opt):
    """All numbers of an optimizer but its parameters; ranks call it together."""
    saved = opt.state_dict()
    slots = {(n, s): ao.arrays.to_host(x) for n, about in saved["tensors"].items() for s, x in about["slots"].items()}
    counts = {n: about["t"] for n, about in saved["tensors"].items()}
    return {key: x.tobytes() for key, x in slots.items()} | {"t": counts, "extra": saved["extra"]}


@dataclass(frozen=True, kw_only=True)
class Centred(ao.Rule):
    """Steps by what is left of a gradient without the means of its rows, columns, matrices, and all of it."""

    lr: float

    def slots(self, xp, p):
        rows, columns = (xp.zeros_like(xp.sum(p, axis=axis)) for axis in (-1, -2))
        return {"m": xp.zeros_like(p), "r": rows, "c": columns}

    def update(self, xp, p, g, s, h):
        r, c = (s[x] + xp.mean(g, axis=axis) for x, axis in (("r", -1), ("c", -2)))
        matrices = xp.mean(g, axis=(-2, -1), keepdims=True)
        m = s["m"] + g - xp.expand_dims(r, axis=-1) - xp.expand_dims(c, axis=-2) - matrices - xp.mean(g)
        return p - h.lr * m, {"m": m, "r": r, "c": c}


def shaken(xp, p, h):
    """The parameters, and random numbers."""
    return p + h.lr * (ao.random(h) - 0.5)


PLAIN = ("rows", "columns", "twice", "narrow")
RULES = {
    "centred": (Centred(lr=0.01), {"names": PLAIN}),
    "centred in batches": (Centred(lr=0.01), {"names": ("matrices", "kernels")}),
    "CAME": (ao.CAME(lr=0.01), {"stats": True, "loss_scale": ao.LossScale()}),
    "CAME, clipped": (ao.CAME(lr=0.01), {"clip_norm": 0.5, "names": ("rows",)}),
    "Adafactor": (ao.Adafactor(), {}),
    "LAMB, centralized": (ao.LAMB(lr=0.01, grad_centralization=True), {"accumulate": 2}),
    "random numbers": (ao.CAME(lr=0.01, project=shaken), {}),
}


@pytest.mark.parametrize(
    ("label", "ranks"),
    marked([(x, n) for x in RULES for n in (2, 3, 4)], lambda label, n: (label, n) == ("centred", 4)),
)
def test_parts_that_end_where_tiles_do_give_what_one_process_does(cupy, label, ranks, tmp_path):
    rule, options = RULES[label]
    one = trained(cupy, rule, ranks, **options)
    one.save(tmp_path / "one")
    expected = held(one)

    def rank(comm):
        opt = trained(cupy, rule, ranks, comm, **options)
        opt.save(tmp_path / "many")
        wrong = [key for key, x in held(opt).items() if x != expected[key]]
        for name, x in opt.params.items():
            if x.array.get().tobytes() != taken(name, one.params[name].get(), comm.rank, ranks)[0].tobytes():
                wrong.append(name)
        return wrong, opt.stats.read() if options.get("stats") else None

    results = ao.ranks.run(ranks, rank)
    assert [wrong for wrong, _ in results] == [[]] * ranks
    assert all(stats == (one.stats.read() if options.get("stats") else None) for _, stats in results)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "many").read_bytes()


@pytest.mark.parametrize(
    ("label", "seed"),
    marked(
        [(label, seed) for label in ("centred", "centred in batches", "CAME") for seed in range(2)],
        lambda *case: case == ("centred", 0),
    ),
)
def test_no_races_and_no_access_out_of_bounds(cupy, label, seed):
    rule, names = RULES[label][0], RULES[label][1].get("names", tuple(CUTS))
    expected = held(trained(cupy, rule, 4, names=names))
    with standin.checking(random=True, seed=seed, workers=3):
        assert all(ao.ranks.run(4, lambda comm: held(trained(cupy, rule, 4, comm, names=names)) == expected))


STAIRS = [((0, 0), (2, 3)), ((2, 0), (1, 2)), ((2, 2), (1, 1))]


def test_parts_that_are_no_grid_are_refused_and_nothing_is_changed(cupy):
    def rank(comm):
        offset, shape = STAIRS[comm.rank]
        part = ao.Part(cupy.ones(shape, "f4"), offset, (3, 3))
        with pytest.raises(ValueError, match="'w' must be cut along whole rows and columns"):
            ao.Optimizer({"w": part}, ao.CAME(lr=0.1), comm=comm)
        opt = ao.Optimizer({"w": part}, ao.LARS(lr=0.1), comm=comm)
        opt.step({"w": cupy.ones(shape, "f4")})
        before = part.array.get()
        opt.grad_centralization = True
        with pytest.raises((ValueError, ao.RankError), match="must be cut along whole rows and columns"):
            opt.step({"w": cupy.ones(shape, "f4")})
        assert part.array.get().tobytes() == before.tobytes()

    ao.ranks.run(3, rank)

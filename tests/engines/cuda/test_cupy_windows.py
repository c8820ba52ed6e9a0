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
    """The offset and shape of each block of a tensor that is divided at these ends along each axis."""
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
"""The ranks' parts for each tensor and number of ranks; they end where tiles of the whole tensor end."""
for name, four in {
    "rows": grid((0, 64, 128, 130), (0, 128)) + NOTHING,
    "columns": grid((0, 64, 70), (0, 128, 150)),
    "twice": grid((0, 70), (0, 128, 150)) * 2,
    "narrow": grid((0, 256, 260), (0, 32, 33)),
    "matrices": grid((0, 1, 3), (0, 2), (0, 70), (0, 32, 33)),
    "kernels": grid((0, 64, 128, 192, 201), (0, 4), (0, 3), (0, 3)),
}.items():
    CUTS[name][4] = four
UNEVEN = {
    "matrices": {
        "rows": grid((0, 5, 120, 121, 130), (0, 128)),
        "columns": grid((0, 30), (0, 3, 61, 140, 152)),
        "both": grid((0, 65, 70), (0, 77, 152)),
        "one": NOTHING + grid((0, 1), (0, 2, 3)) + NOTHING,
        "few": grid((0, 1, 3), (0, 2, 3)),
    },
    "batches": {
        "kernels": grid((0, 3, 68, 69, 70), (0, 4), (0, 3), (0, 3)),
        "inside": grid((0, 40), (0, 4), (0, 1, 3), (0, 2, 3)),
        "several": grid((0, 5, 7), (0, 2), (0, 11, 20), (0, 30)),
        "large": grid((0, 3), (0, 1), (0, 30, 70), (0, 10, 33)),
    },
}
"""Parts of four ranks that end anywhere."""


def taken(x, block):
    """A part of a whole array, copied."""
    return np.ascontiguousarray(x[tuple(slice(a, a + n) for a, n in zip(*block, strict=True))])


def cuts_of(ranks, names):
    """The parts of some tensors by rank."""
    return {name: CUTS[name][ranks] for name in names}


def trained(cupy, rule, cuts, comm=None, **options):
    """An optimizer over whole tensors, or a rank's parts of them, after four steps: one without a gradient."""
    ends = {name: [np.add(*block) for block in blocks] for name, blocks in cuts.items()}
    shapes = {name: tuple(map(int, np.max(x, axis=0))) for name, x in ends.items()}
    params = {}
    for name, x in trees(shapes, "float32", 1).items():
        params[name] = cupy.asarray(x)
        if comm is not None:
            block = cuts[name][comm.rank]
            params[name] = ao.Part(cupy.asarray(taken(x, block)), block[0], x.shape)
    opt = ao.Optimizer(params, rule, comm=comm, engine="cupy", **options)
    for k in range(4):
        given = trees(shapes, "float32", 10 + 10 * k)
        if comm is not None:
            given = {name: taken(g, cuts[name][comm.rank]) for name, g in given.items()}
        given = {name: cupy.asarray(g) for name, g in given.items()}
        opt.step(given if k != 1 else given | dict.fromkeys({"columns"} & given.keys()))
    return opt


def held(opt):
    """All numbers of an optimizer except its parameters; all ranks must call it."""
    saved = opt.state_dict()
    slots = {(n, s): ao.arrays.to_host(x) for n, about in saved["tensors"].items() for s, x in about["slots"].items()}
    counts = {n: about["t"] for n, about in saved["tensors"].items()}
    return {key: x.tobytes() for key, x in slots.items()} | {"t": counts, "extra": saved["extra"]}


@dataclass(frozen=True, kw_only=True)
class Centred(ao.Rule):
    """A step by the gradient without the means of its rows, columns, matrices, and of all its elements."""

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


PLAIN, ALL = ("rows", "columns", "twice", "narrow"), tuple(CUTS)
RULES = {
    "centred": (Centred(lr=0.01), PLAIN, {}),
    "centred in batches": (Centred(lr=0.01), ("matrices", "kernels"), {}),
    "CAME": (ao.CAME(lr=0.01), ALL, {"stats": True, "loss_scale": ao.LossScale()}),
    "CAME, clipped": (ao.CAME(lr=0.01), ("rows",), {"clip_norm": 0.5}),  # global norms count elements in a row
    "Adafactor": (ao.Adafactor(), ALL, {}),
    "LAMB, centralized": (ao.LAMB(lr=0.01, grad_centralization=True), ALL, {"accumulate": 2}),
    "random numbers": (ao.CAME(lr=0.01, project=shaken), ("matrices", "kernels"), {}),
}


@pytest.mark.parametrize(
    ("label", "ranks"),
    marked(
        [(x, n) for x in RULES for n in (2, 3, 4)], lambda label, n: label in ("centred", "random numbers") and n == 4
    ),
)
def test_parts_that_end_where_tiles_do_give_what_one_process_does(cupy, label, ranks, tmp_path):
    """To the last bit."""
    pytest.importorskip("safetensors")
    rule, names, options = RULES[label]
    cuts = cuts_of(ranks, names)
    one = trained(cupy, rule, cuts, **options)
    one.save(tmp_path / "one")
    expected, stats = held(one), one.stats.read() if options.get("stats") else None

    def rank(comm):
        opt = trained(cupy, rule, cuts, comm, **options)
        opt.save(tmp_path / "many")
        wrong = [key for key, x in held(opt).items() if x != expected[key]]
        for name, x in opt.params.items():
            if x.array.get().tobytes() != taken(one.params[name].get(), cuts[name][comm.rank]).tobytes():
                wrong.append(name)
        return wrong, opt.stats.read() if stats is not None else None

    results = ao.ranks.run(ranks, rank)
    assert [wrong for wrong, _ in results] == [[]] * ranks
    assert all(other == stats for _, other in results)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "many").read_bytes()


@pytest.mark.parametrize("which", marked([(x,) for x in UNEVEN], lambda which: which in ("matrices", "batches")))
def test_parts_that_end_anywhere_have_the_sums_of_whole_tensors(cupy, which):
    rule, cuts = Centred(lr=0.1), UNEVEN[which]
    one = trained(cupy, rule, cuts)

    def rank(comm):
        opt = trained(cupy, rule, cuts, comm)
        slots = {(n, s): x for n, about in opt.state_dict()["tensors"].items() for s, x in about["slots"].items()}
        return {name: x.array.get() for name, x in opt.params.items()}, slots

    for r, (params, slots) in enumerate(ao.ranks.run(4, rank)):
        for name, x in params.items():
            whole = taken(one.params[name].get(), cuts[name][r])
            np.testing.assert_allclose(x, whole, rtol=1e-5, atol=1e-5, err_msg=name)
        for (name, slot), x in slots.items():
            np.testing.assert_allclose(
                ao.arrays.to_host(x), one.state[name][slot].get(), rtol=1e-5, atol=1e-5, err_msg=f"{name}, {slot}"
            )


@pytest.mark.parametrize(
    ("label", "seed"),
    marked(
        [(label, seed) for label in ("centred", "centred in batches", "CAME") for seed in range(2)],
        lambda *case: case == ("centred", 0),
    ),
)
def test_no_races_and_no_access_out_of_bounds(cupy, label, seed):
    rule, cuts = RULES[label][0], cuts_of(4, RULES[label][1])
    expected = held(trained(cupy, rule, cuts))
    with standin.checking(random=True, seed=seed, workers=3):
        assert all(ao.ranks.run(4, lambda comm: held(trained(cupy, rule, cuts, comm)) == expected))


STAIRS = [((0, 0), (2, 3)), ((2, 0), (1, 2)), ((2, 2), (1, 1))]


def test_parts_that_are_no_grid_are_refused_and_nothing_is_changed(cupy):
    def rank(comm):
        offset, shape = STAIRS[comm.rank]
        part = ao.Part(cupy.ones(shape, "f4"), offset, (3, 3))
        with pytest.raises(ValueError, match="'w' must be divided along whole rows and columns"):
            ao.Optimizer({"w": part}, ao.CAME(lr=0.1), comm=comm)
        opt = ao.Optimizer({"w": part}, ao.LARS(lr=0.1), comm=comm)
        opt.step({"w": cupy.ones(shape, "f4")})
        before = part.array.get()
        opt.grad_centralization = True
        with pytest.raises((ValueError, ao.RankError), match="must be divided along whole rows and columns"):
            opt.step({"w": cupy.ones(shape, "f4")})
        assert part.array.get().tobytes() == before.tobytes()

    ao.ranks.run(3, rank)

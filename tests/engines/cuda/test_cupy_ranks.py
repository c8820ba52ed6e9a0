"""The CuPy engine over ranks: large tensors are cut, and all ranks compute what one process does, bit for bit."""

import numpy as np
import pytest

import arrayopt as ao
from tests.engines.cuda.test_cupy import trees
from tests.support.slow import marked

SHAPES = {"w": (256, 128), "b": (130,), "k": (70, 20), "s": (), "e": (0, 3), "l": (20000,)}


def trained(cupy, rule, comm=None, bad=False, **options):
    """An optimizer over CuPy's arrays after some steps: one gradient is absent in one, infinite in another."""
    params = {name: cupy.asarray(x) for name, x in trees(SHAPES, "float32", 0).items()}
    opt = ao.Optimizer(params, rule, comm=comm, **options)
    for k in range(3):
        grads = trees(SHAPES, "float32", 1 + k)
        grads["w"][200, 7] = np.inf if bad and k == 2 else 0.5
        grads = {name: cupy.asarray(g) for name, g in grads.items()}
        if k == 1:
            grads["b"] = None
        opt.step(grads)
    return opt


def held(opt):
    """All numbers of an optimizer; ranks call it together."""
    saved = opt.state_dict()
    found = {name: x.get().tobytes() for name, x in opt.params.items()}
    for name, about in saved["tensors"].items():
        found |= {(name, slot): ao.arrays.to_host(x).tobytes() for slot, x in about["slots"].items()}
        found[name, "t"] = about["t"]
    return found | {"step": saved["step"], "extra": saved["extra"]}


def shaken(xp, p, h):
    """The parameters, and random numbers."""
    return p + h.lr * (ao.random(h) - 0.5)


RULES = {
    "LAMB": (ao.LAMB(lr=0.01), {"clip_norm": 0.5, "stats": True}),
    "LANS": (ao.LANS(lr=0.01), {}),
    "AdamW": (ao.AdamW(lr=0.01), {"loss_scale": 8.0, "bad": True}),
    "LAMB, scaled": (ao.LAMB(lr=0.01), {"loss_scale": ao.LossScale(), "bad": True}),
    "CAME": (ao.CAME(lr=0.01), {}),
    "Adafactor": (ao.Adafactor(), {"clip_norm": 0.5}),
    "Muon": (ao.AdamW(lr=0.01), {"groups": {x: ao.Muon(lr=0.02) for x in "wk"}}),  # whole matrices
    "random numbers": (ao.AdamW(lr=0.01, project=shaken), {}),
    "random numbers, rows": (ao.CAME(lr=0.01, project=shaken), {}),
    "random numbers, matrices": (
        ao.AdamW(lr=0.01),
        {"groups": {x: ao.Muon(lr=0.02, project=shaken) for x in "wk"}},
    ),
}
QUICK = (("LAMB", 2), ("AdamW", 3))


@pytest.mark.parametrize(("label", "ranks"), marked([(x, n) for x in RULES for n in (2, 3)], lambda *x: x in QUICK))
def test_ranks_compute_what_one_process_does(cupy, label, ranks, tmp_path):
    rule, options = RULES[label]
    one = trained(cupy, rule, **options)
    one.save(tmp_path / "one")
    expected, stats = held(one), one.stats.read() if options.get("stats") else None

    def rank(comm):
        opt = trained(cupy, rule, comm, **options)
        opt.save(tmp_path / "many")
        kinds = [x.kind for x in opt._parameters.all]
        found = [key for key, x in held(opt).items() if x != expected[key]]
        return found, kinds, opt.stats.read() if stats is not None else None

    results = ao.ranks.run(ranks, rank)
    assert [found for found, *_ in results] == [[]] * ranks
    whole = label in ("Muon", "random numbers, matrices")
    assert (sum(kinds.count("cut") for _, kinds, *_ in results) < ranks) == whole
    assert all(other == stats for *_, other in results)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "many").read_bytes()

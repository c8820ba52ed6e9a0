"""The CuPy engine over ranks: each has whole tensors; parameters come from the others by way of the host."""

import numpy as np
import pytest

import arrayopt as ao
from tests.engines.cuda.test_cupy import bits, trees

SHAPES = {"w": (40, 130), "b": (130,), "k": (70, 20), "s": ()}


def trained(cupy, rule, comm=None, **options):
    """An optimizer over CuPy's arrays after some steps."""
    params = {name: cupy.asarray(x) for name, x in trees(SHAPES, "float32", 0).items()}
    opt = ao.Optimizer(params, rule, comm=comm, **options)
    for k in range(3):
        grads = {name: cupy.asarray(g) for name, g in trees(SHAPES, "float32", 1 + k).items()}
        if k == 1:
            grads["b"] = None
        opt.step(grads)
    return opt


@pytest.mark.parametrize(
    ("rule", "options"),
    [(ao.LAMB(lr=0.01), {"clip_norm": 0.5, "stats": True}), (ao.AdamW(lr=0.01), {"loss_scale": 8.0})],
    ids=["LAMB", "AdamW"],
)
def test_ranks_compute_what_one_process_does(cupy, rule, options, tmp_path):
    one = trained(cupy, rule, **options)
    one.save(tmp_path / "one")
    # the host takes the joint norm where ranks share the work, and the device where they do not: in the last bits
    tolerance = {"rtol": 2e-6, "atol": 1e-7} if options else {"rtol": 0, "atol": 0}

    def rank(comm):
        opt = trained(cupy, rule, comm, **options)
        opt.save(tmp_path / "many")
        held = sum(about["m"].size for about in opt.state.values())
        counts = [about["t"] for about in opt.state.values()]
        stats = opt.stats.read() if options.get("stats") else None
        return {name: x.get() for name, x in opt.params.items()}, held, counts, stats

    results = ao.ranks.run(2, rank)
    for params, _, counts, stats in results:
        for name, x in params.items():
            np.testing.assert_allclose(x, one.params[name].get(), **tolerance)
            assert x.tobytes() == results[0][0][name].tobytes()
        assert counts == [3, 2, 3, 3]
        if stats is not None:
            for name, report in one.stats.read().items():
                assert stats[name] == pytest.approx(report, rel=1e-5)
    assert sum(held for _, held, _, _ in results) == sum(int(np.prod(s)) for s in SHAPES.values())
    again = ao.Optimizer({n: cupy.zeros(s, np.float32) for n, s in SHAPES.items()}, type(rule)(lr=1.0), **options)
    again.load(tmp_path / "many")
    assert bits(again)

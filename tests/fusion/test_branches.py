"""Rules that do something in some updates only: those are made as they are written, and the others are fused."""

from dataclasses import dataclass
from typing import final

import numpy as np

import arrayopt as ao
from arrayopt.rules.words import branch


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Sorting(ao.Rule):
    """Every third update sorts, which is not fused."""

    def slots(self, xp, p):
        return {}

    def as_written(self, t):
        return t % 3 == 0

    def update(self, xp, p, g, s, h):
        return branch(h.t % 3 == 0, lambda: xp.sort(p - g), lambda: p - g), {}


def test_an_update_with_a_branch_is_made_as_it_is_written_and_the_others_are_fused():
    rng = np.random.default_rng(0)
    params = {"w": rng.standard_normal(9), "u": rng.standard_normal((4, 2))}
    opts = [ao.Optimizer({n: p.copy() for n, p in params.items()}, Sorting(), engine=e) for e in ("numpy", "array_api")]
    for t in range(1, 7):
        grads = {n: rng.standard_normal(p.shape) for n, p in params.items()}
        for opt in opts:
            opt.step(grads)
        assert all((opts[0].params[n] == opts[1].params[n]).all() for n in params)
        assert bool((np.diff(opts[0].params["w"]) >= 0).all()) == (t % 3 == 0)
    assert "some updates of each tensor as they are written\n    pass 0: load p g; store p" in opts[0].explain()
